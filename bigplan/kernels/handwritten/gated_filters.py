"""The gated short convolution of runtime/mixers/convolution.py, both passes: written by hand.

Plain torch reads or writes the vectors of a token 14 times forward and 45 backward with 3 taps.
Here a program has some channels of some tokens and reads them once from memory, earlier and later
tokens' out of cache: 4 and 7 times. Sums are in fp32 and rounded once. A token before the sequence
counts as zero; runtime/mixers/convolution.py has what ranks that share a sequence and documents
that are kept apart take.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.mechanics import FILTERED_TOKENS as ROWS

WIDTH = 64  # channels of a program
WARPS = 4


class Vectors(NamedTuple):
    """B, c and v of runtime/mixers/convolution.py, or gradients by them, [b, s, h], contiguous."""

    before: Tensor
    after: Tensor
    value: Tensor


@triton.jit
def _tile(x, first, length, column, channels, ROWS: tl.constexpr):
    """Tokens `first` and after in fp32; zeros before and after the sequence."""
    row = tl.arange(0, ROWS)
    here = (first + row >= 0) & (first + row < length)
    inside = here[:, None] & (column < channels)[None, :]
    at = x + tl.cast(first, tl.int64) * channels + (row[:, None] * channels + column[None, :])
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _put(x, value, first, length, column, channels, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    inside = (first + row < length)[:, None] & (column < channels)[None, :]
    at = x + tl.cast(first, tl.int64) * channels + (row[:, None] * channels + column[None, :])
    tl.store(at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _filter(filters, tap, column, channels, TAPS: tl.constexpr):
    at = filters + column * TAPS + tap
    return tl.load(at, mask=column < channels, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _sums(
    before, value, filters, bias, first, length, column, channels, TAPS: tl.constexpr,
    BIASED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    if BIASED:
        total += _filter(bias, 0, column, channels, 1)
    for tap in tl.static_range(TAPS):
        at = first + tap - (TAPS - 1)
        read = _tile(before, at, length, column, channels, ROWS)
        read *= _tile(value, at, length, column, channels, ROWS)
        total += read * _filter(filters, tap, column, channels, TAPS)
    return total


@triton.jit(do_not_specialize=("length",))
def _convolved(
    before, after, value, filters, bias, out, length, channels, TAPS: tl.constexpr,
    BIASED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    first, column = tl.program_id(0) * ROWS, tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    start = tl.program_id(2).to(tl.int64) * length * channels
    total = _sums(
        before + start, value + start, filters, bias, first, length, column, channels, TAPS,
        BIASED, ROWS, WIDTH,
    )  # fmt: skip
    total *= _tile(after + start, first, length, column, channels, ROWS)
    _put(out + start, total, first, length, column, channels, ROWS)


@triton.jit(do_not_specialize=("length",))
def _convolved_backward(
    before, after, value, filters, bias, gradient, by_before, by_after, by_value, parts,
    length, channels, TAPS: tl.constexpr, BIASED: tl.constexpr, ASKED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`parts`: of some tokens, by each tap of each channel and by its bias."""
    block, batch = tl.program_id(0), tl.program_id(2)
    first, column = block * ROWS, tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    start = batch.to(tl.int64) * length * channels
    before, after, value, gradient = before + start, after + start, value + start, gradient + start
    total = _sums(
        before, value, filters, bias, first, length, column, channels, TAPS, BIASED, ROWS, WIDTH
    )
    given = _tile(gradient, first, length, column, channels, ROWS)
    _put(by_after + start, given * total, first, length, column, channels, ROWS)
    given *= _tile(after, first, length, column, channels, ROWS)
    if ASKED:
        row = batch * tl.num_programs(0) + block
        to, inside = parts + (row.to(tl.int64) * channels + column) * (TAPS + 1), column < channels
        for tap in tl.static_range(TAPS):
            at = first + tap - (TAPS - 1)
            read = _tile(before, at, length, column, channels, ROWS)
            read *= _tile(value, at, length, column, channels, ROWS)
            tl.store(to + tap, tl.sum(given * read, 0), mask=inside)
        tl.store(to + TAPS, tl.sum(given, 0), mask=inside)
    by_read = given * _filter(filters, TAPS - 1, column, channels, TAPS)
    for tap in tl.static_range(TAPS - 1):
        at = first + (TAPS - 1) - tap
        later = _tile(gradient, at, length, column, channels, ROWS)
        later *= _tile(after, at, length, column, channels, ROWS)
        by_read += later * _filter(filters, tap, column, channels, TAPS)
    factor = _tile(value, first, length, column, channels, ROWS)
    _put(by_before + start, by_read * factor, first, length, column, channels, ROWS)
    factor = _tile(before, first, length, column, channels, ROWS)
    _put(by_value + start, by_read * factor, first, length, column, channels, ROWS)


def convolved(vectors: Vectors, filters: Tensor, bias: Tensor | None) -> Tensor:
    """[b, s, h], of filters [h, taps] and a bias [h]."""
    assert all(x.is_contiguous() for x in (*vectors, filters))
    out, (grid, sizes) = torch.empty_like(vectors.after), _launch(vectors, filters)
    _convolved[grid](
        *vectors, filters, filters if bias is None else bias, out, *out.shape[1:],
        BIASED=bias is not None, **sizes,
    )  # fmt: skip
    return out


def convolved_backward(
    vectors: Vectors, filters: Tensor, bias: Tensor | None, gradient: Tensor, *, asked: bool
) -> tuple[Vectors, Tensor | None, Tensor | None]:
    """Gradients by vectors, and by filters and the bias if asked."""
    (grid, sizes), (channels, taps) = _launch(vectors, filters), filters.shape
    found = Vectors(*map(torch.empty_like, vectors))
    parts = gradient.new_empty(
        grid[0] * grid[2] if asked else 0, channels, taps + 1, dtype=torch.float32
    )
    _convolved_backward[grid](
        *vectors, filters, filters if bias is None else bias, gradient.contiguous(), *found,
        parts, *gradient.shape[1:], BIASED=bias is not None, ASKED=asked, **sizes,
    )  # fmt: skip
    if not asked:
        return found, None, None
    whole = parts.sum(0).to(filters.dtype)
    return found, whole[:, :-1].contiguous(), None if bias is None else whole[:, -1].contiguous()


def _launch(vectors: Vectors, filters: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    batch, length, channels = vectors.after.shape
    grid = triton.cdiv(length, ROWS), triton.cdiv(channels, WIDTH), batch
    return grid, {"TAPS": filters.shape[1], "ROWS": ROWS, "WIDTH": WIDTH, "num_warps": WARPS}
