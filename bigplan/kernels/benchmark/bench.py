"""`bigplan kernels bench`: predicted, measured, the byte limit, and every baseline side by side."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bigplan.errors import InputError, quoted
from bigplan.kernels.benchmark import beside, cases, modules, sweep
from bigplan.kernels.benchmark.boundaries import boundaries
from bigplan.kernels.benchmark.cases import Case
from bigplan.kernels.benchmark.measuring import KernelBench, KernelRecord, in_us
from bigplan.kernels.fusion.body import Body
from bigplan.kernels.fusion.fuse import work_of
from bigplan.kernels.optimised import optimise

PARTS = {
    "norms": "norms forward, beside eager, torch.compile, Liger and QuACK",
    "norms-back": "and their backwards",
    "pointwise": "activations, rotary positions and softmax forward",
    "pointwise-back": "and their backwards",
    "sweep-norms": "every tile of the norms' kernels, beside the model's first pick",
    "sweep-pointwise": "every tile of the others",
    "loss": "linear + cross-entropy in chunks, generated and by hand, beside its products alone",
    "adamw": "AdamW on resident state beside torch's fused one",
    "boundaries": "kernels as one and as two, in blocks of five families and with convolutions",
    "workloads": "a GPT-2 block and a convolutional block, time and memory kept",
    "library": "the same of blocks of Hugging Face transformers",
}
ALONE = {
    "loss": beside.losses,
    "adamw": beside.updates,
    "boundaries": boundaries,
    "workloads": modules.workloads,
    "library": modules.library,
}


def run(
    part: str | None, out: Path | None, console: Console, *, rehearse: bool, tune: int
) -> list[KernelRecord]:
    """Measure one part or all, print tables, append records to `out` and give them back.

    Raises InputError.
    """
    if part is not None and part not in PARTS:
        raise InputError(f"no part is called {quoted(part)} (parts: {', '.join(PARTS)})")
    if not torch.cuda.is_available() and not rehearse:
        raise InputError("kernels are measured on a CUDA GPU, and there is none; try --rehearse")
    bench = _PartBench(out, console, rehearse=rehearse, tune=tune)
    for name in [part] if part else PARTS:
        bench.part(name)
    return bench.records


class _PartBench(KernelBench):
    """The measurements of every part."""

    def part(self, name: str) -> None:
        """Measure what PARTS says."""
        with torch.cuda.stream(self.stream):
            self._part(name)

    def _part(self, name: str) -> None:
        self.began = time.monotonic()
        torch._dynamo.reset()
        source = cases.norms if "norms" in name else cases.pointwise
        if name in ALONE:
            ALONE[name](self)
        elif name.startswith("sweep"):
            sweep.sweeps(self, name, list(source(small=self.small)))
        else:
            self._compare(name, list(source(small=self.small)), back=name.endswith("-back"))

    # --- Beside the baselines.

    def _compare(self, name: str, found: Sequence[Case], *, back: bool) -> None:
        table = Table(title=f"{name}: microseconds (in a CUDA graph), % of the copy's rate")
        for column in ("case", "predicted", "limit", "generated", *BASELINES):
            table.add_column(column, justify="left" if column == "case" else "right")
        for case in found:
            if self.late(case.label):
                continue
            row = self._row(case, back=back)
            self.record("case", part=name, back=back, **row)
            shown = [
                _shown(row["ways"].get(way), row["limit"]) for way in ("generated", *BASELINES)
            ]
            table.add_row(
                case.label + " *" * case.aside, in_us(row["predicted"]), in_us(row["limit"]), *shown
            )
        self.console.print(table)
        self.console.print(f"* set aside from any fit. Copy: {self.copy / 1e12:.3f} TB/s")

    def _row(self, case: Case, *, back: bool) -> KernelRecord:
        inputs = case.inputs(self.device, self.dtype)
        ours = optimise(case.function, gpu=self.optimiser.gpu, tune=self.tune)
        ways: dict[str, KernelRecord] = {}
        with torch._functorch.config.patch(donated_buffer=False):
            for way, function in (("generated", ours), *self._baselines(case)):
                ways[way] = self._timed(function, inputs, back=back)
                torch.cuda.empty_cache()
        plan = ours.kernels.plans[-1]
        units = [u for u in plan.cover.units if u.members[0].backward == back]
        moved = _least_bytes(plan.graph, back=back)
        return {
            "case": case.label, "aside": case.aside, "limit": moved / self.copy,
            "predicted": sum(unit.seconds for unit in units), "bytes": moved, "ways": ways,
            "operations": sum(_operations(u.fused.body) for u in units if u.fused is not None),
            "units": [unit.name for unit in units],
            "picked": [str(unit.fused.tile) if unit.fused else "torch" for unit in units],
            "taken": [str(kernel.tile) for kernel in ours.kernels.kernels],
        }  # fmt: skip

    def _timed(
        self, function: Callable[..., Any], inputs: list[Tensor], *, back: bool
    ) -> KernelRecord:
        try:
            if not back:
                plain = [x.detach() for x in inputs]

                def ahead() -> object:
                    with torch.no_grad():
                        return function(*plain)

                # Predicted is the training forward, which keeps statistics, too: the same bytes.
                function(*inputs)
                return {"seconds": self.seconds(ahead), "graph": self.in_graph(ahead)}
            result = function(*inputs)
            gradient = torch.randn_like(result)
            wanted = [x for x in inputs if x.requires_grad]

            def backward() -> object:
                return torch.autograd.grad(
                    result, wanted, gradient, retain_graph=True, allow_unused=True
                )

            return {"seconds": self.seconds(backward), "graph": self.in_graph(backward)}
        except Exception as problem:  # noqa: BLE001 -- a baseline that fails is a result
            return {"failed": f"{type(problem).__name__}: {problem}"[:300]}

    def _baselines(self, case: Case) -> Iterator[tuple[str, Callable[..., Any]]]:
        yield "eager", case.function
        if self.cuda:
            yield "compile", torch.compile(case.function)
            if case.aside:  # a third of the cases: its trials take up to ten seconds each
                yield "autotune", torch.compile(case.function, mode="max-autotune-no-cudagraphs")
        for library in ("liger", "quack"):
            function = _of_library(library, case.kind)
            if function is not None and self.cuda:
                yield library, function


BASELINES = ("eager", "compile", "autotune", "liger", "quack")
LIGER = {
    "rms_norm": ("liger_kernel.transformers.functional", "liger_rms_norm"),
    "layer_norm": ("liger_kernel.transformers.functional", "liger_layer_norm"),
    "swiglu": ("liger_kernel.transformers.functional", "liger_swiglu"),
    "geglu": ("liger_kernel.transformers.functional", "liger_geglu"),
}
QUACK = {"rms_norm": ("quack", "rmsnorm")}


def _of_library(library: str, kind: str) -> Callable[..., Any] | None:
    """Liger's or QuACK's function of a kind, where it is installed and has one."""
    entry = (LIGER if library == "liger" else QUACK).get(kind)
    if entry is None:
        return None
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(entry[0]), entry[1])
    except (ImportError, AttributeError):
        return None
    if kind == "rms_norm":
        return lambda x, w: function(x, w, eps=1e-5)
    return (lambda x, w, b: function(x, w, b, 1e-5)) if kind == "layer_norm" else function


def _operations(body: Body) -> float:
    """Fp32 operations of a generated kernel, as the model counts them."""
    work = work_of(body)
    return work.lane_operations * work.rows * work.width


def _least_bytes(graph: Any, *, back: bool) -> float:
    """Bytes that must move: what one half reads from outside once, and gives."""
    made = {v.name for n in graph.nodes if n.backward == back for v in n.outputs}
    half = [n for n in graph.nodes if n.backward == back]
    read = {graph.base[ref] for n in half for ref in n.refs()}
    given = graph.outputs[graph.forward_outputs :] if back else graph.outputs[:1]
    sizes = [graph.values[name].nbytes for name in read - made]
    sizes += [graph.values[graph.base[name]].nbytes for name in dict.fromkeys(given)]
    return float(sum(sizes))


def _shown(way: KernelRecord | None, limit: float) -> str:
    if way is None:
        return ""
    if "failed" in way:
        return "failed"
    graph = f" ({in_us(way['graph'])})" if way["graph"] else ""
    return f"{in_us(way['seconds'])}{graph} {limit / way['seconds']:.0%}"
