"""A short causal convolution, SiLU, and heads brought to a length of 1: written by hand.

Plain torch (runtime/delta_rule.py) reads and writes the heads some 15 times forward. Here a program
has some tokens of one head: it reads them once, and again as many as there are taps out of cache.
All is in fp32 and rounded once. The backward has two kernels, since the gradient by a token adds up
those by the sums of later tokens, which other programs make.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.kernels.delta_rule_programs import put
from bigplan.mechanics import FILTERED_TOKENS as ROWS

WARPS = 4
LENGTH_EPSILON = 1e-6  # added to the square of a length, as transformers does


class Heads(NamedTuple):
    """Heads side by side: their width, a power of two, and the length that each is brought to."""

    width: int
    norm: float | None = None


@triton.jit
def _rows(x, first, length, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens `first` and after of one head in fp32; zeros before and after the sequence."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (first + row >= 0) & (first + row < length)
    at = x + tl.cast(first, tl.int64) * columns + (row[:, None] * columns + column[None, :])
    return tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def _filter(filters, tap, TAPS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.load(filters + tl.arange(0, WIDTH) * TAPS + tap).to(tl.float32)[None, :]


@triton.jit
def _sums(
    x, filters, bias, first, length, columns, BIAS: tl.constexpr, TAPS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    if BIAS:
        total += tl.load(bias + tl.arange(0, WIDTH)).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        shifted = _rows(x, first + tap - (TAPS - 1), length, columns, ROWS, WIDTH)
        total += shifted * _filter(filters, tap, TAPS, WIDTH)
    return total


@triton.jit(do_not_specialize=("length", "heads"))
def _filtered(
    x, filters, bias, out, scale, epsilon, length, heads, BIAS: tl.constexpr, UNIT: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    first, head, batch = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    columns = heads * WIDTH
    here = batch.to(tl.int64) * length * columns + head * WIDTH
    filters += head * WIDTH * TAPS
    bias += head * WIDTH
    total = _sums(x + here, filters, bias, first, length, columns, BIAS, TAPS, ROWS, WIDTH)
    value = total * tl.sigmoid(total)
    if UNIT:
        value = value * (tl.rsqrt(tl.sum(value * value, 1) + epsilon) * scale)[:, None]
    put(out + here, value, first, length, columns, ROWS, WIDTH)


@triton.jit(do_not_specialize=("length", "heads"))
def _by_sums(
    x, filters, bias, gradient, by_sums, by_filters, scale, epsilon, length, heads,
    EACH: tl.constexpr, BIAS: tl.constexpr, UNIT: tl.constexpr, ASKED: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients by the sums; `gradient` has EACH heads for each of x, which are added up.

    A bias is one more tap, of ones.
    """
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, columns = block * ROWS, heads * WIDTH
    start = batch.to(tl.int64) * length * columns
    here = start + head * WIDTH
    filters += head * WIDTH * TAPS
    bias += head * WIDTH
    total = _sums(x + here, filters, bias, first, length, columns, BIAS, TAPS, ROWS, WIDTH)
    by_value = tl.zeros((ROWS, WIDTH), tl.float32)
    for each in tl.static_range(EACH):
        own = gradient + start * EACH + (head * EACH + each) * WIDTH
        by_value += _rows(own, first, length, columns * EACH, ROWS, WIDTH)
    share = tl.sigmoid(total)
    if UNIT:
        value = total * share
        factor = tl.rsqrt(tl.sum(value * value, 1) + epsilon)[:, None]
        unit = value * factor
        along = tl.sum(unit * by_value, 1)[:, None]
        by_value = (by_value - unit * along) * (factor * scale)
    by_sum = by_value * share * (1.0 + total * (1.0 - share))
    put(by_sums + here, by_sum, first, length, columns, ROWS, WIDTH)
    if ASKED:
        row = batch * tl.num_programs(0) + block
        to = by_filters + (row.to(tl.int64) * columns + head * WIDTH) * (TAPS + BIAS)
        to += tl.arange(0, WIDTH) * (TAPS + BIAS)
        for tap in tl.static_range(TAPS):
            shifted = _rows(x + here, first + tap - (TAPS - 1), length, columns, ROWS, WIDTH)
            tl.store(to + tap, tl.sum(by_sum * shifted, 0))
        if BIAS:
            tl.store(to + TAPS, tl.sum(by_sum, 0))


@triton.jit(do_not_specialize=("length", "heads"))
def _by_tokens(
    by_sums, filters, by_x, length, heads, TAPS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    first, head, batch = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    columns = heads * WIDTH
    here = batch.to(tl.int64) * length * columns + head * WIDTH
    filters += head * WIDTH * TAPS
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for tap in tl.static_range(TAPS):
        later = _rows(by_sums + here, first + (TAPS - 1) - tap, length, columns, ROWS, WIDTH)
        total += later * _filter(filters, tap, TAPS, WIDTH)
    put(by_x + here, total, first, length, columns, ROWS, WIDTH)


def filtered(x: Tensor, filters: Tensor, heads: Heads, bias: Tensor | None = None) -> Tensor:
    """SiLU of x [b, s, heads * width] convolved with filters [heads * width, taps]; contiguous.

    `bias` [heads * width] is added before SiLU.
    """
    out, grid = torch.empty_like(x), _grid(x, heads)
    _filtered[grid](
        x, filters, _or(bias, x), out, heads.norm or 1.0, LENGTH_EPSILON, x.shape[1], grid[1],
        BIAS=bias is not None, UNIT=heads.norm is not None, TAPS=filters.shape[1], ROWS=ROWS,
        WIDTH=heads.width, num_warps=WARPS,
    )  # fmt: skip
    return out


def filtered_backward(
    gradient: Tensor,
    x: Tensor,
    filters: Tensor,
    heads: Heads,
    *,
    asked: bool,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients by x, and by filters if asked; `gradient` [b, s, heads * each * width].

    Each head of x was read as so many, whose gradients lie side by side. With a bias, that by
    filters has one more column, the gradient by the bias.
    """
    grid, each = _grid(x, heads), gradient.shape[-1] // x.shape[-1]
    by_sums, by_x, taps = torch.empty_like(x), torch.empty_like(x), filters.shape[1]
    parts, biased = grid[0] * grid[2] if asked else 0, bias is not None
    by_filters = x.new_empty(parts, len(filters), taps + biased, dtype=torch.float32)
    sizes = {"TAPS": taps, "ROWS": ROWS, "WIDTH": heads.width, "num_warps": WARPS}
    _by_sums[grid](
        x, filters, _or(bias, x), gradient, by_sums, by_filters, heads.norm or 1.0, LENGTH_EPSILON,
        x.shape[1], grid[1], EACH=each, BIAS=biased, UNIT=heads.norm is not None, ASKED=asked,
        **sizes,
    )  # fmt: skip
    _by_tokens[grid](by_sums, filters, by_x, x.shape[1], grid[1], **sizes)
    return by_x, by_filters.sum(0).to(filters.dtype) if asked else None


def _or(bias: Tensor | None, x: Tensor) -> Tensor:
    """A kernel takes a tensor where there is no bias, too, and does not read it."""
    return x if bias is None else bias


def _grid(x: Tensor, heads: Heads) -> tuple[int, int, int]:
    batch, length, columns = x.shape
    return triton.cdiv(length, ROWS), columns // heads.width, batch
