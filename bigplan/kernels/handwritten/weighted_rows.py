"""Activations of experts' rows, times a weight each: f(gate) * up * weight, or f(up) * weight.

Where weights weigh what experts read (Llama 4), f(weight * gate) * weight * up. One kernel for any
number of rows, as how many come to a rank's experts may be another number every time. The backward
reads a row once, though it adds it up: nothing else that it gives waits for the sum. That reaches
3.5 to 4.0 TB/s on an H200, where kernels generated for one shape, which read a row twice or hold
all of it, reached 2.6 to 3.4 (benchmarks/results/2026-11-29-h200-wide-experts).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.kernels.handwritten.rows import WARPS, columns_at_once
from bigplan.spec.clamped import ALPHA, LIMIT

# Of gelu's tanh approximation, x sigmoid(2 s (x + c x^3)): s is the root of 2 / pi.
GELU_SCALE = tl.constexpr(0.7978845608028654)
GELU_CUBE = tl.constexpr(0.044715)
MOST = tl.constexpr(LIMIT)
STEEP = tl.constexpr(ALPHA)


@triton.jit
def _opened(x, KIND: tl.constexpr):
    """f(x) and its slope."""
    if KIND == "relu2":
        root = tl.maximum(x, 0.0)
        opened, slope = root * root, 2.0 * root
    else:
        if KIND == "geglu":
            inner = 2.0 * GELU_SCALE * x * (1.0 + GELU_CUBE * x * x)
            steeper = 2.0 * GELU_SCALE * x * (1.0 + 3.0 * GELU_CUBE * x * x)
        elif KIND == "clamped_swiglu":
            inner = STEEP * x
            steeper = inner
        else:
            inner = x
            steeper = x
        share = tl.sigmoid(inner)
        opened, slope = x * share, share * (1.0 + steeper * (1.0 - share))
    return opened, slope


@triton.jit
def _read(gate, up, at, inside, KIND: tl.constexpr):
    """What is there of gate and up; where there is no gate, up twice."""
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    x = y
    if KIND != "relu2":
        x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    return x, y


@triton.jit
def _factors(plain_x, plain_y, weight, KIND: tl.constexpr, INPUTS: tl.constexpr):
    """The x and y of an activation f(x) y."""
    x, y = plain_x, plain_y
    if KIND == "relu2":
        y = tl.full(plain_y.shape, 1.0, tl.float32)
    if KIND == "clamped_swiglu":
        x, y = tl.minimum(x, MOST), tl.minimum(tl.maximum(y, -MOST), MOST) + 1.0
    if INPUTS:
        x, y = x * weight, y * weight
    return x, y


@triton.jit
def _forward(
    gate, up, weights, out, columns,
    KIND: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    for first in range(0, columns, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        at, inside = row * columns + offsets, offsets < columns
        plain_x, plain_y = _read(gate, up, at, inside, KIND)
        x, y = _factors(plain_x, plain_y, weight, KIND, INPUTS)
        opened, _ = _opened(x, KIND)
        value = opened * y
        if not INPUTS:
            value *= weight
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gate, up, weights, gradient, by_gate, by_up, by_weights, columns,
    KIND: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        at, inside = row * columns + offsets, offsets < columns
        plain_x, plain_y = _read(gate, up, at, inside, KIND)
        x, y = _factors(plain_x, plain_y, weight, KIND, INPUTS)
        by_out = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        opened, slope = _opened(x, KIND)
        by_x, by_y, inner = by_out * y * slope, by_out * opened, opened * y
        if INPUTS:
            total += by_x * plain_x + by_y * plain_y
        else:
            total += by_out * inner
            inner *= weight
        by_x, by_y = by_x * weight, by_y * weight
        if KIND == "clamped_swiglu":  # beyond its bounds a factor stays what it is
            by_x = tl.where(plain_x > MOST, 0.0, by_x)
            by_y = tl.where(tl.abs(plain_y) > MOST, 0.0, by_y)
        kind = gradient.dtype.element_ty
        if KIND == "relu2":  # of up alone
            tl.store(by_up + at, by_x.to(kind), mask=inside)
        else:
            tl.store(by_gate + at, by_x.to(kind), mask=inside)
            tl.store(by_up + at, by_y.to(kind), mask=inside)
        tl.store(gradient + at, inner.to(kind), mask=inside)
    tl.store(by_weights + row, tl.sum(total, 0))


def weighted(
    gate: Tensor | None, up: Tensor, weights: Tensor, *, kind: str = "swiglu", inputs: bool = False
) -> Tensor:
    """The activation of contiguous rows [rows, f] with a weight each, fp32 [rows].

    `kind` as ModelSpec's `mlp`: swiglu, clamped_swiglu, geglu, or relu2, which has no gate.
    `inputs`: the weights weigh what experts read.
    """
    out = torch.empty_like(up)
    if len(up):
        _forward[(len(up),)](
            up if gate is None else gate, up, weights, out, up.shape[1],
            KIND=kind, INPUTS=inputs, BLOCK=columns_at_once(up), num_warps=WARPS,
        )  # fmt: skip
    return out


def weighted_backward(
    gate: Tensor | None,
    up: Tensor,
    weights: Tensor,
    gradient: Tensor,
    *,
    kind: str = "swiglu",
    inputs: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients by gate, up and weights; what `weighted` gives goes to `gradient`. Contiguous."""
    by_gate = None if gate is None else torch.empty_like(gate)
    by_up, by_weights = torch.empty_like(up), torch.empty_like(weights)
    if len(up):
        _backward[(len(up),)](
            up if gate is None else gate, up, weights, gradient,
            by_up if by_gate is None else by_gate, by_up, by_weights, up.shape[1],
            KIND=kind, INPUTS=inputs, BLOCK=columns_at_once(up), num_warps=WARPS,
        )  # fmt: skip
    return by_gate, by_up, by_weights
