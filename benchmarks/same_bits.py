"""Which operators of a step give other bits when they run again, and what the same bits would cost.

    python benchmarks/same_bits.py operators     each operator again and again beside copies
    python benchmarks/same_bits.py run MODEL     the same few steps twice: losses and norms

`run` takes decisions as KEY=VALUE after the model, as `bigplan plan --set` does, and SEQ=, BATCH=,
CAP= (of the GPU), and SAME=1 for a deterministic run. BIGPLAN_CLUSTER is a cluster in place of
h200-1x.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA: torch asks for it

import torch
import torch.nn.functional as F
from torch import Tensor

AGAIN = 12


def same(name: str, work: Callable[[], tuple[Tensor, ...]]) -> None:
    """Say how many of the repetitions differ from the first, and milliseconds of one."""
    side = torch.cuda.Stream()
    noise = torch.randn(64 << 20, device="cuda")
    first = [t.clone() for t in work()]
    differing = 0
    for i in range(AGAIN):
        with torch.cuda.stream(side):
            for _ in range(i):
                noise.mul_(1.0001)
        again = work()
        differing += any(not torch.equal(a, b) for a, b in zip(first, again, strict=True))
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        work()
    end.record()
    torch.cuda.synchronize()
    print(
        f"{name}: {differing} of {AGAIN} differ; {start.elapsed_time(end) / 10:.3f} ms", flush=True
    )


def attention(heads: int, kv: int, d: int, s: int, b: int, dtype: torch.dtype) -> Any:
    """The runtime's call, forward and backward."""
    q = torch.randn(b, s, heads, d, device="cuda", dtype=dtype).requires_grad_()
    k, v = (torch.randn(b, s, kv, d, device="cuda", dtype=dtype).requires_grad_() for _ in range(2))
    g = torch.randn(b, heads, s, d, device="cuda", dtype=dtype)

    def work() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return (out, *torch.autograd.grad(out, (q, k, v), g))

    return work


def operators() -> None:
    """All that a block and the loss use."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    bf16 = torch.bfloat16
    shapes = {
        "32/8 heads of 128, 4096 x 2": (32, 8, 128, 4096, 2),
        "32/8 heads of 128, 32768 x 1": (32, 8, 128, 32768, 1),
        "25 heads of 64, 1024 x 8": (25, 25, 64, 1024, 8),
        "16/8 heads of 64, 256 x 2": (16, 8, 64, 256, 2),
    }
    for label, shape in shapes.items():
        same(f"attention {label}, as chosen", attention(*shape, bf16))
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(backend):
                try:
                    same(f"attention {label}, {backend.name}", attention(*shape, bf16))
                    torch.use_deterministic_algorithms(True)
                    same(
                        f"attention {label}, {backend.name}, deterministic", attention(*shape, bf16)
                    )
                except RuntimeError as error:
                    print(f"attention {label}, {backend.name}: {str(error).splitlines()[0]}")
                finally:
                    torch.use_deterministic_algorithms(False)
        torch.use_deterministic_algorithms(True)
        same(f"attention {label}, as chosen, deterministic", attention(*shape, bf16))
        torch.use_deterministic_algorithms(False)
    others()
    products()


def others() -> None:
    """Norms, the loss and sums."""
    from bigplan.runtime.layers.lookup import add_rows
    from bigplan.runtime.operators import cross_entropy, layer_norm, rms_norm

    bf16 = torch.bfloat16
    same("attention fp32, 16 heads of 64, 1024 x 2", attention(16, 16, 64, 1024, 2, torch.float32))
    x = torch.randn(8192, 4096, device="cuda", dtype=bf16).requires_grad_()
    w = torch.randn(4096, device="cuda", dtype=bf16).requires_grad_()
    g = torch.randn_like(x)
    same("rms_norm", lambda: torch.autograd.grad(rms_norm(x, w, 1e-5)[0], (x, w), g))
    bias = torch.randn_like(w).requires_grad_()
    same("layer_norm", lambda: torch.autograd.grad(layer_norm(x, w, bias, 1e-5), (x, w, bias), g))
    targets = torch.randint(0, 32000, (4096,), device="cuda")
    scores = torch.randn(4096, 32000, device="cuda", dtype=bf16)

    def loss() -> tuple[Tensor, ...]:
        leaf = scores.clone().requires_grad_()
        value = cross_entropy(leaf, targets)
        return value, *torch.autograd.grad(value, leaf)

    same("cross_entropy", loss)
    table = torch.zeros(32000, 4096, device="cuda")
    rows = torch.randint(0, 60, (8192,), device="cuda")
    grads = torch.randn(8192, 4096, device="cuda", dtype=bf16)

    def looked_up() -> tuple[Tensor, ...]:
        table.zero_()
        add_rows(table, rows, grads)
        return (table,)

    same("gradients of rows", looked_up)
    flat = torch.randn(100_000_000, device="cuda")
    same("norm", lambda: (torch.linalg.vector_norm(flat, dtype=torch.float32),))
    same("bias gradient", lambda: (g.flatten(0, -2).sum(0),))


def products() -> None:
    """Products of layers, and of weights' gradients added to sums."""
    from bigplan.runtime.add_product import add_product

    bf16 = torch.bfloat16
    for m, n, k in (
        (4096, 4096, 8192),
        (1600, 6400, 4096),
        (1600, 1600, 4096),
        (50257, 1600, 4096),
        (4096, 14336, 8192),
    ):
        a = torch.randn(k, m, device="cuda", dtype=bf16)
        c = torch.randn(k, n, device="cuda", dtype=bf16)
        total = torch.zeros(m, n, device="cuda")

        def product(a: Tensor = a, c: Tensor = c, total: Tensor = total) -> tuple[Tensor, ...]:
            add_product(total, a, c, fresh=True)
            return (total.clone(),)

        same(f"weight gradient {m} x {n} over {k}", product)
        w2 = torch.randn(n, m, device="cuda", dtype=bf16)
        same(f"product {k} x {m} x {n}", lambda a=a, w2=w2: (F.linear(a, w2),))


def run(model: str, *settings: str) -> None:
    """Two runs of a few steps in one process."""
    from benchmarks.limit_run import alike
    from bigplan.planner import Request, make_plan
    from bigplan.runtime import worker as module
    from bigplan.runtime.worker import NativeWorker
    from bigplan.spec.experiment import Experiment

    module.first_values = alike  # type: ignore[attr-defined]
    pairs: dict[str, str] = dict(setting.split("=") for setting in settings)
    training = {
        "sequence_length": int(pairs.pop("SEQ", 1024)),
        "global_batch": int(pairs.pop("BATCH", 16)),
        "deterministic": bool(pairs.pop("SAME", "")),
    }
    cluster = os.environ.get("BIGPLAN_CLUSTER", "h200-1x")
    caps = {"gpu": pairs.pop("CAP")} if "CAP" in pairs else {}
    experiment = Experiment.model_validate(
        {"model": model, "cluster": cluster, "training": training, "set": pairs, "caps": caps}
    )
    plan = make_plan(Request.of(experiment))
    print(model, settings, plan.strategy.model_dump(exclude_defaults=True))
    if plan.strategy.ranks > 1:
        sys.exit(f"the plan has {plan.strategy.ranks} ranks; use a cluster of one GPU")
    runs = []
    for _ in range(2):
        worker = NativeWorker(plan, 0, Path(mkdtemp()))
        worker.preflight()
        worker.start("")
        steps = [worker.step() for _ in range(5)]
        runs.append([(step.loss, step.gradient_norm) for step in steps])
        print("  seconds", [round(step.seconds, 4) for step in steps])
        worker.close()
    for i, (a, b) in enumerate(zip(*runs, strict=True)):
        print(f"  step {i + 1}: {a} {b} {'same' if a == b else 'OTHER'}", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["operators"]:
            operators()
        case ["run", model, *settings]:
            run(model, *settings)
        case _:
            sys.exit(__doc__)
