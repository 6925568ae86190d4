"""A short causal convolution, SiLU, and heads brought to a length of 1: written by hand.

Plain torch (runtime/mixers/delta_rule.py) reads and writes the heads some 15 times forward. Here a
program has some tokens of one head: it reads them once, and again as many as there are taps out of
cache. All is in fp32 and rounded once. The backward has three kernels: the gradient by a token adds
up those by the sums of later tokens, which other programs make, and gradients by filters add up
many tokens, which programs of their own do fastest. Where documents are kept apart, no tap
reads a token before its document.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.kernels.handwritten.delta_rule_programs import put, tile
from bigplan.mechanics import FILTERED_TOKENS as ROWS
from bigplan.mechanics import SUMMED_TOKENS

WARPS = 4
LENGTH_EPSILON = 1e-6  # added to the square of a length, as transformers does


class Taps(NamedTuple):
    """What a convolution reads beside x [b, s, heads * width]."""

    filters: Tensor  # [heads * width, taps]
    bias: Tensor | None = None  # [heads * width], added before SiLU
    begins: Tensor | None = None  # the first token of each token's document, int32 [b, s]


class Heads(NamedTuple):
    """Heads side by side: their width, and the length that each is brought to."""

    width: int
    norm: float | None = None


@triton.jit
def _filter(filters, tap, TAPS: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr):
    column = tl.arange(0, WIDTH)
    weight = tl.load(filters + column * TAPS + tap, mask=column < USED, other=0.0)
    return weight.to(tl.float32)[None, :]


@triton.jit
def _seen_later(begins, first, later, length, DOCUMENTS: tl.constexpr, ROWS: tl.constexpr):
    """Which tokens are of the document of the token so many after them."""
    token = first + tl.arange(0, ROWS)
    seen = token + later < length
    if DOCUMENTS:
        seen = seen & (tl.load(begins + token + later, mask=seen, other=0) <= token)
    return seen


@triton.jit
def _sums(
    x, filters, bias, begins, first, length, columns, BIAS: tl.constexpr, DOCUMENTS: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    begin = tl.zeros((ROWS,), tl.int32)
    if DOCUMENTS:
        begin = tl.load(begins + first + row, mask=first + row < length, other=0)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    if BIAS:
        total += tl.load(bias + column, mask=column < USED, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        token = first + row - back
        seen = ((token >= begin) & (token < length))[:, None] & (column < USED)[None, :]
        at = x + tl.cast(first, tl.int64) * columns
        at += (row - back)[:, None] * columns + column[None, :]
        read = tl.load(at, mask=seen, other=0.0).to(tl.float32)
        total += read * _filter(filters, tap, TAPS, WIDTH, USED)
    return total


@triton.jit(do_not_specialize=("length", "heads"))
def _filtered(
    x, filters, bias, begins, out, scale, epsilon, length, heads, UNIT: tl.constexpr,
    BIAS: tl.constexpr, DOCUMENTS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    first, head, batch = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    columns, start = heads * USED, batch.to(tl.int64) * length
    here = start * columns + head * USED
    total = _sums(
        x + here, filters + head * USED * TAPS, bias + head * USED, begins + start, first, length,
        columns, BIAS, DOCUMENTS, TAPS, ROWS, WIDTH, USED,
    )  # fmt: skip
    value = total * tl.sigmoid(total)
    if UNIT:
        value = value * (tl.rsqrt(tl.sum(value * value, 1) + epsilon) * scale)[:, None]
    put(out + here, value, first, length, columns, USED, ROWS, WIDTH)


@triton.jit(do_not_specialize=("length", "heads"))
def _by_sums(
    x, filters, bias, begins, gradient, by_sums, scale, epsilon, length, heads, EACH: tl.constexpr,
    UNIT: tl.constexpr, BIAS: tl.constexpr, DOCUMENTS: tl.constexpr, TAPS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """Gradients by the sums; `gradient` has EACH heads for each of x, which are added up."""
    first, head, batch = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    columns, start = heads * USED, batch.to(tl.int64) * length
    here = start * columns + head * USED
    by_value = tl.zeros((ROWS, WIDTH), tl.float32)
    for each in tl.static_range(EACH):
        own = gradient + start * columns * EACH + (head * EACH + each) * USED
        given = tile(own, first, length, columns * EACH, USED, ROWS, WIDTH)
        by_value += given.to(tl.float32)
    total = _sums(
        x + here, filters + head * USED * TAPS, bias + head * USED, begins + start, first, length,
        columns, BIAS, DOCUMENTS, TAPS, ROWS, WIDTH, USED,
    )  # fmt: skip
    share = tl.sigmoid(total)
    if UNIT:
        value = total * share
        factor = tl.rsqrt(tl.sum(value * value, 1) + epsilon)[:, None]
        unit = value * factor
        along = tl.sum(unit * by_value, 1)[:, None]
        by_value = (by_value - unit * along) * (factor * scale)
    by_sum = by_value * share * (1.0 + total * (1.0 - share))
    put(by_sums + here, by_sum, first, length, columns, USED, ROWS, WIDTH)


@triton.jit(do_not_specialize=("length", "heads"))
def _by_tokens(
    by_sums, filters, begins, by_x, length, heads, DOCUMENTS: tl.constexpr, TAPS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """Gradients by x: each token adds up those of the sums that read it."""
    first, head, batch = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    columns, start = heads * USED, batch.to(tl.int64) * length
    here = start * columns + head * USED
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for tap in tl.static_range(TAPS):
        seen = _seen_later(begins + start, first, TAPS - 1 - tap, length, DOCUMENTS, ROWS)
        at = first + TAPS - 1 - tap
        later = tile(by_sums + here, at, length, columns, USED, ROWS, WIDTH).to(tl.float32)
        weight = _filter(filters + head * USED * TAPS, tap, TAPS, WIDTH, USED)
        total += tl.where(seen[:, None], later, 0.0) * weight
    put(by_x + here, total, first, length, columns, USED, ROWS, WIDTH)


@triton.jit(do_not_specialize=("length", "heads"))
def _by_filters(
    by_sums, x, begins, by_filters, length, heads, BIAS: tl.constexpr, DOCUMENTS: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    USED: tl.constexpr,
):  # fmt: skip
    """Gradients by filters, of TOKENS tokens; all taps but the first find them in cache.

    A bias is one more tap, of ones.
    """
    part, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns, start = heads * USED, batch.to(tl.int64) * length
    here, column = start * columns + head * USED, tl.arange(0, WIDTH)
    place = (batch * tl.num_programs(0) + part).to(tl.int64) * columns + head * USED + column
    end = tl.minimum(part * TOKENS + TOKENS, length)
    for tap in tl.static_range(TAPS):
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for first in range(part * TOKENS, end, ROWS):
            seen = _seen_later(begins + start, first, TAPS - 1 - tap, length, DOCUMENTS, ROWS)
            at = first + TAPS - 1 - tap
            later = tile(by_sums + here, at, length, columns, USED, ROWS, WIDTH).to(tl.float32)
            read = tile(x + here, first, length, columns, USED, ROWS, WIDTH).to(tl.float32)
            total += tl.where(seen[:, None], later * read, 0.0)
        to = by_filters + place * (TAPS + BIAS)
        tl.store(to + tap, tl.sum(total, 0), mask=column < USED)
    if BIAS:
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for first in range(part * TOKENS, end, ROWS):
            total += tile(by_sums + here, first, length, columns, USED, ROWS, WIDTH).to(tl.float32)
        to = by_filters + place * (TAPS + BIAS)
        tl.store(to + TAPS, tl.sum(total, 0), mask=column < USED)


def filtered(x: Tensor, taps: Taps, heads: Heads) -> Tensor:
    """SiLU of x [b, s, heads * width], convolved and with the bias; contiguous."""
    out, (grid, sizes) = torch.empty_like(x), _launch(x, taps, heads, ROWS)
    _filtered[grid](
        x, *_given(taps), out, heads.norm or 1.0, LENGTH_EPSILON, x.shape[1], grid[1],
        UNIT=heads.norm is not None, ROWS=ROWS, **sizes,
    )  # fmt: skip
    return out


def filtered_backward(
    gradient: Tensor, x: Tensor, taps: Taps, heads: Heads, *, asked: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients by x, and by filters if asked; `gradient` [b, s, heads * each * width].

    Each head of x was read as so many, whose gradients lie side by side. With a bias, that by
    filters has one more column, the gradient by the bias.
    """
    (grid, sizes), each = _launch(x, taps, heads, ROWS), gradient.shape[-1] // x.shape[-1]
    by_sums, by_x = torch.empty_like(x), torch.empty_like(x)
    filters, bias, begins = _given(taps)
    _by_sums[grid](
        x, filters, bias, begins, gradient, by_sums, heads.norm or 1.0, LENGTH_EPSILON,
        x.shape[1], grid[1], EACH=each, UNIT=heads.norm is not None, ROWS=ROWS, **sizes,
    )  # fmt: skip
    biased = sizes.pop("BIAS")  # which has nothing to do with tokens' gradients
    _by_tokens[grid](by_sums, filters, begins, by_x, x.shape[1], grid[1], ROWS=ROWS, **sizes)
    if not asked:
        return by_x, None
    grid, sizes = _launch(x, taps, heads, SUMMED_TOKENS)
    rows, columns = filters.shape
    parts = x.new_empty(grid[0] * grid[2], rows, columns + biased, dtype=torch.float32)
    _by_filters[grid](
        by_sums, x, begins, parts, x.shape[1], grid[1], ROWS=ROWS, TOKENS=SUMMED_TOKENS, **sizes
    )
    return by_x, parts.sum(0).to(filters.dtype)


def _given(taps: Taps) -> tuple[Tensor, Tensor, Tensor]:
    """A kernel takes a tensor where there is none, too, and does not read it."""
    filters, bias, begins = taps
    return filters, filters if bias is None else bias, filters if begins is None else begins


def _launch(
    x: Tensor, taps: Taps, heads: Heads, tokens: int
) -> tuple[tuple[int, int, int], dict[str, int]]:
    batch, length, columns = x.shape
    grid = triton.cdiv(length, tokens), columns // heads.width, batch
    sizes = {
        "TAPS": taps.filters.shape[1],
        "BIAS": taps.bias is not None,
        "DOCUMENTS": taps.begins is not None,
        "WIDTH": triton.next_power_of_2(heads.width),
        "USED": heads.width,
        "num_warps": WARPS,
    }
    return grid, sizes
