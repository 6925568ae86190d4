"""Norm and gate of what a delta rule reads, by head: O / rms(O) * weight * silu(gate).

A program has some tokens of one head. All is in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.kernels.handwritten.delta_rule_programs import put, tile

TOKENS = 32  # of a program
WARPS = 4


@triton.jit(do_not_specialize=("length", "heads"))
def _normed(
    x, gates, weight, out, epsilon, length, heads, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    USED: tl.constexpr,
):  # fmt: skip
    first, head, batch = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    columns = heads * USED
    here, column = batch.to(tl.int64) * length * columns + head * USED, tl.arange(0, WIDTH)
    value = tile(x + here, first, length, columns, USED, ROWS, WIDTH).to(tl.float32)
    gate = tile(gates + here, first, length, columns, USED, ROWS, WIDTH).to(tl.float32)
    scale = tl.load(weight + column, mask=column < USED, other=0.0).to(tl.float32)[None, :]
    normed = value * tl.rsqrt(tl.sum(value * value, 1) / USED + epsilon)[:, None]
    result = normed * scale * gate * tl.sigmoid(gate)
    put(out + here, result, first, length, columns, USED, ROWS, WIDTH)


@triton.jit(do_not_specialize=("length", "heads"))
def _normed_back(
    x, gates, weight, gradient, by_x, by_gates, by_weight, epsilon, length, heads,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """`by_weight`: of a program's tokens and head."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, columns, column = block * ROWS, heads * USED, tl.arange(0, WIDTH)
    here = batch.to(tl.int64) * length * columns + head * USED
    value = tile(x + here, first, length, columns, USED, ROWS, WIDTH).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 1) / USED + epsilon)[:, None]
    normed = value * factor
    scale = tl.load(weight + column, mask=column < USED, other=0.0).to(tl.float32)[None, :]
    given = tile(gradient + here, first, length, columns, USED, ROWS, WIDTH).to(tl.float32)
    gate = tile(gates + here, first, length, columns, USED, ROWS, WIDTH).to(tl.float32)
    share = tl.sigmoid(gate)
    by_gate = given * normed * scale * share * (1.0 + gate * (1.0 - share))
    put(by_gates + here, by_gate, first, length, columns, USED, ROWS, WIDTH)
    given *= gate * share
    place = (batch * tl.num_programs(0) + block).to(tl.int64) * columns + head * USED + column
    tl.store(by_weight + place, tl.sum(given * normed, 0), mask=column < USED)
    given *= scale
    along = tl.sum(given * normed, 1)[:, None] / USED
    given = (given - normed * along) * factor
    put(by_x + here, given, first, length, columns, USED, ROWS, WIDTH)


def normed(x: Tensor, gates: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[b, s, heads * width] of such x and gates, contiguous, and a weight [width]."""
    out, (grid, sizes) = torch.empty_like(x), _launch(x, weight)
    _normed[grid](x, gates, weight, out, epsilon, x.shape[1], grid[1], **sizes)
    return out


def normed_backward(
    gradient: Tensor, x: Tensor, gates: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by x, gates and weight. `x` gets its own gradient, in place."""
    grid, sizes = _launch(x, weight)
    by_gates = torch.empty_like(gates)
    by_weight = x.new_empty(grid[2] * grid[0] * grid[1], len(weight), dtype=torch.float32)
    _normed_back[grid](
        x, gates, weight, gradient, x, by_gates, by_weight, epsilon, x.shape[1], grid[1], **sizes
    )
    return x, by_gates, by_weight.sum(0).to(weight.dtype)


def _launch(x: Tensor, weight: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    batch, length, columns = x.shape
    grid = triton.cdiv(length, TOKENS), columns // len(weight), batch
    width = triton.next_power_of_2(len(weight))
    return grid, {"ROWS": TOKENS, "WIDTH": width, "USED": len(weight), "num_warps": WARPS}
