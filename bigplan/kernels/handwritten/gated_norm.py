"""An RMSNorm, by groups of columns, of what a gate's SiLU multiplies: written by hand.

Apart, gate and norm read and write five times a tensor forward and eight backward; here three and
five. A program has rows of a group whole, so all is in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.mechanics import GATED_NORM_ROWS as ROWS


@triton.jit
def _loaded(x, row, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A row of this program's group in fp32; zeros beyond it, and after the last row."""
    column = tl.arange(0, BLOCK)
    at = (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * WIDTH + column
    return tl.load(x + at, mask=(column < WIDTH) & (row < rows), other=0.0).to(tl.float32)


@triton.jit
def _stored(x, value, row, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * WIDTH + column
    tl.store(x + at, value.to(x.dtype.element_ty), mask=(column < WIDTH) & (row < rows))


@triton.jit
def _weights(weight, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = weight + tl.program_id(1) * WIDTH + column
    return tl.load(at, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=("rows",))
def _forward(x, gates, weight, out, epsilon, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    gate = _loaded(gates, row, rows, WIDTH, BLOCK)
    value = _loaded(x, row, rows, WIDTH, BLOCK) * gate * tl.sigmoid(gate)
    factor = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + epsilon)
    _stored(out, value * factor * _weights(weight, WIDTH, BLOCK), row, rows, WIDTH, BLOCK)


@triton.jit(do_not_specialize=("rows",))
def _backward(
    gradient, x, gates, weight, by_x, by_gates, by_weight, epsilon, rows, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`by_weight`: of each program, added up over its rows."""
    scale = _weights(weight, WIDTH, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(ROWS):
        row = tl.program_id(0) * ROWS + number
        gate, read = _loaded(gates, row, rows, WIDTH, BLOCK), _loaded(x, row, rows, WIDTH, BLOCK)
        given = _loaded(gradient, row, rows, WIDTH, BLOCK)
        share = tl.sigmoid(gate)
        value = read * gate * share
        factor = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + epsilon)
        normed = value * factor
        total += given * normed
        given *= scale
        along = tl.sum(given * normed, 0) / WIDTH
        by_value = (given - normed * along) * factor
        _stored(by_x, by_value * gate * share, row, rows, WIDTH, BLOCK)
        by_gate = by_value * read * share * (1.0 + gate * (1.0 - share))
        _stored(by_gates, by_gate, row, rows, WIDTH, BLOCK)
    _stored(by_weight, total, tl.program_id(0), tl.num_programs(0), WIDTH, BLOCK)


def forward(x: Tensor, gates: Tensor, weight: Tensor, groups: int, epsilon: float) -> Tensor:
    """The norm of x [..., width] times SiLU of gates, over each of `groups` parts of a row."""
    rows, sizes = _sizes(x, groups)
    out = torch.empty_like(x)
    _forward[rows, groups](x, gates, weight, out, epsilon, rows, **sizes)
    return out


def backward(
    gradient: Tensor, x: Tensor, gates: Tensor, weight: Tensor, groups: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by x, gates and weight."""
    rows, sizes = _sizes(x, groups)
    by_x, by_gates, programs = torch.empty_like(x), torch.empty_like(x), triton.cdiv(rows, ROWS)
    by_weight = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    _backward[programs, groups](
        gradient, x, gates, weight, by_x, by_gates, by_weight, epsilon, rows, ROWS=ROWS, **sizes
    )
    return by_x, by_gates, by_weight.sum(0).to(weight.dtype)


def _sizes(x: Tensor, groups: int) -> tuple[int, dict[str, int]]:
    """Rows, and how wide a program's are: its threads have 32 columns each, if they are so many."""
    columns = x.shape[-1]
    width = columns // groups
    block = triton.next_power_of_2(width)
    warps = min(16, max(1, block // 1024))
    return x.numel() // columns, {"WIDTH": width, "BLOCK": block, "num_warps": warps}
