"""Rows and matrices of experts cast to E4M3, each by scales of its own, in one kernel each.

Products of experts (runtime/experts/grouped_eight_bits.py) want both factors with the dimension
that is summed last in memory, and a scale for each row that it leaves. So `by_row` scales rows as
they lie: a program reads one whole row, 2 bytes an element, and writes 1. `by_column` scales
columns of each expert's part and writes it transposed: a program has some columns of one expert,
which it reads twice. Parts of rows lie one behind the other, and their transposes begin at
multiples of 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.mechanics import LEAST_LARGEST

VALUES = torch.float8_e4m3fn
HIGHEST, LEAST = torch.finfo(VALUES).max, tl.constexpr(LEAST_LARGEST)
SIDE, DEEP = 64, 128  # columns of a program, and rows of a tile
MOST_WARPS, OF_A_WARP = 16, 512  # elements of a row


@triton.jit(do_not_specialize=("expert",))  # of rows there is any number
def _by_row(
    x, values, scales, width, wide, experts, expert, step, HIGHEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    top = tl.maximum(tl.max(tl.abs(value)), LEAST)
    small = (value * (HIGHEST / top)).to(values.dtype.element_ty)
    tl.store(values + row * wide + at, small, mask=at < width)
    tl.store(scales + (row % experts) * expert + (row // experts) * step, top / HIGHEST)


@triton.jit
def _by_column(
    x, ends, padded, values, scales, width, long, HIGHEST: tl.constexpr,
    RAGGED: tl.constexpr, SIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Columns of one expert's part [rows, width] of x, and its place in `values`.

    RAGGED: parts end at `ends` and their transposes, in rows of `long`, at `padded`; otherwise rows
    of x take turns, `long` of each of as many experts as the grid has.
    """
    expert = tl.program_id(1)
    j = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    inside = j < width
    if RAGGED:
        behind = expert > 0
        first = tl.load(ends + expert - 1, mask=behind, other=0)
        count = tl.load(ends + expert) - first
        place = tl.multiple_of(tl.load(padded + expert - 1, mask=behind, other=0), 16)
        filled = tl.multiple_of(tl.load(padded + expert) - place, 16)
        step = width
        part = x + first.to(tl.int64) * width
        to = values + place
    else:
        count = long
        filled = long
        step = width * tl.num_programs(1)
        part = x + expert.to(tl.int64) * width
        to = values + expert.to(tl.int64) * width * long
    top = tl.zeros((SIDE,), tl.float32)
    for deep in range(0, count, DEEP):
        i = deep + tl.arange(0, DEEP)
        here = (i < count)[:, None] & inside[None, :]
        at = i.to(tl.int64)[:, None] * step + j[None, :]
        value = tl.load(part + at, mask=here, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.max(tl.abs(value), 0))
    top = tl.maximum(top, LEAST)
    for deep in range(0, filled, DEEP):
        i = deep + tl.arange(0, DEEP)
        here = (i < count)[:, None] & inside[None, :]
        at = i.to(tl.int64)[:, None] * step + j[None, :]
        value = tl.load(part + at, mask=here, other=0.0).to(tl.float32)
        small = (value * (HIGHEST / top)[None, :]).to(values.dtype.element_ty)
        there = inside[:, None] & (i < filled)[None, :]
        tl.store(to + j.to(tl.int64)[:, None] * long + i[None, :], tl.trans(small), mask=there)
    tl.store(scales + expert * width + j, top / HIGHEST, mask=inside)


def by_row(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """Write contiguous x [m, k] in E4M3 to `values` [m, k], and its rows' factors to `scales`.

    Rows of values are contiguous. scales, fp32 [experts, m / experts], of rows that take turns: row
    j E + e is row j of expert e.
    """
    if not len(x):
        return
    block = triton.next_power_of_2(x.shape[1])
    _by_row[(len(x),)](
        x, values, scales, x.shape[1], values.stride(0), len(scales), *scales.stride(),
        HIGHEST=HIGHEST, BLOCK=block, num_warps=min(MOST_WARPS, max(1, block // OF_A_WARP)),
    )  # fmt: skip


def by_column(
    x: Tensor, experts: int, ends: tuple[Tensor, Tensor] | None = None, long: int = 0
) -> tuple[Tensor, Tensor]:
    """Contiguous x transposed in E4M3, and its columns' factors, fp32 [experts, k].

    Without `ends` rows of x [f * experts, k] take turns: [experts, k, f]. With them x [rows, k] has
    experts' rows one behind the other, up to the first `ends`, int32 [experts]. They are columns of
    a matrix [k, long], up to the second ends, which are multiples of 16; zeros fill them up.
    """
    width = x.shape[1]
    shape = (experts, width, len(x) // experts) if ends is None else (width, long)
    values = x.new_empty(shape, dtype=VALUES)
    scales = x.new_empty(experts, width, dtype=torch.float32)
    some, padded = (scales, scales) if ends is None else ends
    _by_column[triton.cdiv(width, SIDE), experts](
        x, some, padded, values, scales, width, shape[-1],
        HIGHEST=HIGHEST, RAGGED=ends is not None, SIDE=SIDE, DEEP=DEEP,
    )  # fmt: skip
    return values, scales
