"""Experts' products by one grouped kernel and by a kernel each, and their activation's kernels.

    python -m benchmarks.experts_apart

Eight experts, in bf16, with weights' gradients added to fp32 sums as a backward does. A kernel each
has the host's wait for numbers of rows in it. The activation's backward moves 12 bytes an element
beside each row's weight. About a minute on an H200; needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.parts import milliseconds
from bigplan.kernels.handwritten import rows, weighted_rows
from bigplan.runtime.experts import dispatch as experts

EXPERTS = 8
WIDTHS = (4096, 14336), (4096, 11008), (6144, 16384), (2048, 8192), (2048, 1024), (5120, 8192)
ROWS = 2048, 4096, 8192, 12288, 20480  # of an expert
ACTIVATIONS = (65536, 768), (65536, 1408), (32768, 2880), (16384, 14336), (163840, 11008)


def _make(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").mul_(0.1).bfloat16()


def _products(h: int, f: int, each: int) -> dict[str, Callable[[], object]]:
    """Of rows with matrices [f * experts, h]; the first expert has some more, the second fewer."""
    counts = torch.full((EXPERTS,), each)
    counts[0] += 200
    counts[1] -= 200
    ends = counts.cumsum(0).to("cuda", torch.int32)
    x, inner, weight = _make(EXPERTS * each, h), _make(EXPERTS * each, f), _make(f * EXPERTS, h)
    entering, leaving = experts.entering(weight, EXPERTS), experts.leaving(weight, EXPERTS)
    total = torch.zeros(f * EXPERTS, h, device="cuda")

    def add() -> None:
        experts.add_grouped(total, (inner, x), ends, fresh=False, by=rows.put)

    return {
        "entering": lambda: experts.grouped(x, entering, ends),
        "leaving": lambda: experts.grouped(inner, leaving, ends),
        "by weight": add,
    }


def products() -> None:
    """Milliseconds and TFLOP/s of each product, both ways."""
    print("h, f, rows an expert: ms (TFLOP/s) by one kernel, by a kernel each")
    for h, f in WIDTHS:
        for each in ROWS:
            flops, told = 2.0 * EXPERTS * each * h * f, []
            for name, work in _products(h, f, each).items():
                for apart in (False, True):
                    with patch.object(experts, "worth_apart", lambda *_, apart=apart: apart):
                        ms = milliseconds(work)
                    told.append(f"{ms:8.3f} ({flops / ms / 1e9:4.0f})")
                told.insert(-2, name)
            print(h, f, each, *told, flush=True)


def activations() -> None:
    """Milliseconds and TB/s of the weighted activation's backward."""
    print("rows, f: ms (TB/s) of the activation's backward")
    for number, f in ACTIVATIONS:
        gate, up, gradient = (_make(number, f) for _ in range(3))
        weights = torch.rand(number, device="cuda")
        ms = milliseconds(partial(weighted_rows.weighted_backward, gate, up, weights, gradient))
        print(number, f, f"{ms:.3f} ({12e-9 * number * f / ms:.2f})", flush=True)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    products()
    activations()
