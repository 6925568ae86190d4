"""SwiGLU: silu(gate) * up in one pass, and both gradients in one more.

Plain torch moves 5 tensors forward and 11 backward; these move 3 and 5, and 6 where the backward
gives the output again: to run the forward again takes 3 more. At 32,768 x 14,336 in bf16 a tensor
is 0.94 GB, 0.22 ms of an H200's memory. Arithmetic is fp32 inside.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements a program: 8 bytes a thread and load in bf16, at 4 warps


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """The same in plain torch."""
    return F.silu(gate) * up


@triton.jit
def _forward(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gate, up, gradient, by_gate, by_up, out, count, OUT: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    d = tl.load(gradient + at, mask=inside).to(tl.float32)
    s = tl.sigmoid(g)
    silu = g * s
    # d silu / d gate = s (1 + gate (1 - s))
    tl.store(by_gate + at, (d * u * (s + silu * (1 - s))).to(by_gate.dtype.element_ty), mask=inside)
    tl.store(by_up + at, (d * silu).to(by_up.dtype.element_ty), mask=inside)
    if OUT:
        tl.store(out + at, (silu * u).to(out.dtype.element_ty), mask=inside)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise: contiguous tensors of one shape and dtype."""
    assert gate.is_contiguous() and up.is_contiguous() and gate.shape == up.shape
    out = torch.empty_like(gate)
    count = gate.numel()
    _forward[(triton.cdiv(count, BLOCK),)](gate, up, out, count, BLOCK=BLOCK)
    return out


def backward(
    gate: Tensor, up: Tensor, gradient: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients by gate and up; the forward's output goes to `out`, which may be `gradient`."""
    gradient = gradient.contiguous()
    by_gate, by_up = torch.empty_like(gate), torch.empty_like(up)
    count = gate.numel()
    _backward[(triton.cdiv(count, BLOCK),)](
        gate, up, gradient, by_gate, by_up, gradient if out is None else out, count,
        OUT=out is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return by_gate, by_up
