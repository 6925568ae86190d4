"""Generated kernels of a training step beside what they could take the place of: loss and AdamW."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from bigplan.kernels.benchmark.measuring import KernelBench
from bigplan.kernels.fusion.price import Pricer
from bigplan.kernels.fusion.single import cross_entropy
from bigplan.kernels.handwritten import cross_entropy as by_hand
from bigplan.kernels.library import Library
from bigplan.kernels.loss import chunk_for, linear_cross_entropy
from bigplan.kernels.update import AdamW

TOKENS, HIDDEN, WORDS = 8192, 4096, 128_256
BUDGETS = (2**28, 2**29, 2**30, 3 * 2**29, 2**31)  # bytes of a chunk's logits
UPDATED = (2**20, 2**24, 2**27)  # parameters


@dataclass
class _LossSizes:
    """Inputs of the loss, and the held fp32 sum of the weight's gradient."""

    x: Tensor
    weight: Tensor
    targets: Tensor
    total: Tensor

    @classmethod
    def of(cls, bench: KernelBench) -> _LossSizes:
        tokens, hidden, words = (16, 16, 100) if bench.small else (TOKENS, HIDDEN, WORDS)
        kind: Any = {"device": bench.device, "dtype": bench.dtype}
        return cls(
            torch.randn(tokens, hidden, **kind),
            torch.randn(words, hidden, **kind) / hidden**0.5,
            torch.randint(words, (tokens,), device=bench.device),
            torch.zeros(words, hidden, device=bench.device),
        )

    def chunked(self, chunk: int, loss: Callable[[Tensor, Tensor], None]) -> Tensor:
        """Gradient by x; the weight's is added to the sum. `loss` turns logits into gradients."""
        by_x = torch.empty_like(self.x)
        for first in range(0, len(self.x), chunk):
            part = slice(first, first + chunk)
            logits = self.x[part] @ self.weight.T
            loss(logits, self.targets[part])
            torch.mm(logits, self.weight, out=by_x[part])
            _add_product(self.total, logits, self.x[part])
        return by_x


def _add_product(total: Tensor, gradient: Tensor, x: Tensor) -> None:
    """As runtime/layers/products.py adds it: in fp32, inside the product on a GPU."""
    if total.is_cuda:
        torch.addmm(total, gradient.T, x, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(gradient.T.float(), x.float())


def losses(bench: KernelBench) -> None:
    """Seconds and memory by the budget of a chunk, and of whole functions of others."""
    table = Table(title="loss: milliseconds, times its products alone, GiB beside the sum")
    for column in ("logits", "chunk", "way", "ms", "of products", "GiB", "same bits", "kernel ms"):
        table.add_column(column, justify="left" if column == "way" else "right")
    sizes, library = _LossSizes.of(bench), Library(bench.optimiser.pricer)
    tokens, words = len(sizes.x), len(sizes.weight)
    for budget in BUDGETS[:1] if bench.small else BUDGETS:
        chunk = chunk_for(tokens, words, sizes.x.element_size(), budget)
        alone = 0.0
        for way, loss in _ways(bench, library):
            if bench.late(f"loss {way} {chunk}"):
                continue
            row = _loss_row(bench, sizes, chunk, loss)
            alone = alone or row["seconds"]
            row |= {"of_products": row["seconds"] / alone, "chunk": chunk, "way": way}
            row["predicted"] = _predicted(bench.optimiser.pricer, sizes, chunk)
            bench.record("loss", **row)
            table.add_row(
                f"{budget / 2**20:.0f} MiB", str(chunk), way, f"{row['seconds'] * 1e3:.2f}",
                f"{row['of_products']:.3f}", f"{row['extra']:.2f}", str(row["same"]),
                f"{row['predicted'] * 1e3:.2f}" if way == "generated" else "",
            )  # fmt: skip
    for way, run in _wholes(bench, sizes):
        row = _tried(bench, run)
        bench.record("loss", way=way, **row)
        shown = ("failed", "", "")
        if "seconds" in row:
            shown = f"{row['seconds'] * 1e3:.2f}", "", f"{row['extra']:.2f}"
        table.add_row("", "", way, *shown, "", "")
    bench.console.print(table)
    bench.console.print("kernel ms: predicted, of all chunks' generated kernels.")


def _ways(
    bench: KernelBench, library: Library
) -> Iterator[tuple[str, Callable[[Tensor, Tensor], None]]]:
    one = torch.ones(1, device=bench.device)

    def generated(logits: Tensor, targets: Tensor) -> None:
        library.cross_entropy_(logits, targets, one)

    def written(logits: Tensor, targets: Tensor) -> None:
        _, lse = by_hand.forward(logits, targets)
        by_hand.backward_(logits, targets, lse, one.expand(len(targets)))

    yield "products alone", lambda logits, targets: None
    yield "by hand", written
    yield "generated", generated


def _loss_row(
    bench: KernelBench, sizes: _LossSizes, chunk: int, loss: Callable[[Tensor, Tensor], None]
) -> dict[str, Any]:
    sizes.total.zero_()
    first, sums = sizes.chunked(chunk, loss), sizes.total.clone()
    sizes.total.zero_()
    same = torch.equal(first, sizes.chunked(chunk, loss)) and torch.equal(sums, sizes.total)
    del first, sums
    return {**_timed(bench, lambda: sizes.chunked(chunk, loss)), "same": same}


def _tried(bench: KernelBench, run: Callable[[], object]) -> dict[str, Any]:
    try:
        return _timed(bench, run)
    except Exception as problem:  # noqa: BLE001 -- a baseline that fails is a result
        return {"failed": f"{type(problem).__name__}: {problem}"[:300]}


def _timed(bench: KernelBench, run: Callable[[], object]) -> dict[str, Any]:
    """Seconds, and GiB at the peak beside what was there."""
    run()
    before = 0
    if bench.cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds = bench.seconds(run)
    extra = torch.cuda.max_memory_allocated() - before if bench.cuda else 0
    return {"seconds": seconds, "extra": extra / 2**30}


def _predicted(pricer: Pricer, sizes: _LossSizes, chunk: int) -> float:
    """Seconds of the generated kernel, all chunks together."""
    dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[sizes.x.dtype]
    made = cross_entropy(chunk, len(sizes.weight), dtype)
    fused = pricer.fused(made.graph, made.graph.nodes, frozenset(made.wanted))
    assert not isinstance(fused, str), fused
    return fused.seconds * len(sizes.x) / chunk


def _wholes(bench: KernelBench, sizes: _LossSizes) -> Iterator[tuple[str, Callable[[], object]]]:
    """Functions with gradients by autograd, ours too: the weight's in 16 bits."""
    x, weight = (t.detach().requires_grad_() for t in (sizes.x, sizes.weight))

    def of(function: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(x, weight, sizes.targets), (x, weight))

    def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.T).float(), targets)

    yield "linear_cross_entropy", of(linear_cross_entropy)
    yield "eager", of(plain)
    if not bench.cuda:
        return
    yield "compile", of(torch.compile(plain))
    try:
        liger = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError:
        return
    fused = liger.liger_fused_linear_cross_entropy
    yield "liger", of(lambda x, weight, targets: _first(fused(x, weight, targets)))


def _first(result: Any) -> Tensor:
    """Some versions return more than the loss."""
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss


def updates(bench: KernelBench) -> None:
    """AdamW with a 16-bit copy, of fp32 and of 16-bit gradients."""
    table = Table(title="adamw: microseconds, G parameters a second")
    for column in ("parameters", "gradient", "way", "us", "G/s"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for count in (1000,) if bench.small else UPDATED:
        for gradient in (torch.float32, torch.bfloat16):
            for way, run in _updates(bench, count, gradient):
                if bench.late(f"adamw {way} {count}"):
                    continue
                seconds, kind = bench.seconds(run), str(gradient).removeprefix("torch.")
                bench.record("adamw", way=way, count=count, gradient=kind, seconds=seconds)
                table.add_row(
                    f"{count:,}", kind, way, f"{seconds * 1e6:.1f}", f"{count / seconds / 1e9:.1f}"
                )
    bench.console.print(table)


def _updates(
    bench: KernelBench, count: int, gradient: torch.dtype
) -> Iterator[tuple[str, Callable[[], object]]]:
    p, m, v = (torch.rand(count, device=bench.device) for _ in range(3))
    g = torch.randn(count, device=bench.device).to(gradient)
    copy = torch.empty(count, device=bench.device, dtype=torch.bfloat16)
    ours = AdamW(bench.optimiser.pricer)
    constants = (0.99999, 0.1, 0.95, 0.05, 0.5, 1e-8, -1e-4)
    number, divisor = (torch.full((), value, device=bench.device) for value in (10.0, 2.0))

    def generated() -> None:
        factors = ours.factors(constants, 2.0, p.device)
        ours.step(p, g, (m, v), copy, factors)

    def torchs() -> None:
        torch._fused_adamw_(
            [p], [g.float()], [m], [v], [], [number], amsgrad=False, lr=1e-4, beta1=0.9,
            beta2=0.95, weight_decay=0.1, eps=1e-8, maximize=False, grad_scale=divisor,
        )  # fmt: skip
        copy.copy_(p)

    yield "generated", generated
    yield "torch", torchs
