"""Matrices cast to 8-bit floating point by one scale, as they are and transposed, in two passes.

The first finds the largest absolute value (2 bytes read an element of 16 bits), the second reads
2 bytes and writes 1 for each form. Plain torch (runtime/linear/eight_bits.py) moves several times
as much.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.mechanics import LEAST_LARGEST

COUNTED, SIDE = 8192, 64  # elements of a program that looks for the largest; a cast tile's sides
LEAST = tl.constexpr(LEAST_LARGEST)


@triton.jit
def _largest(x, found, count, COUNTED: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * COUNTED + tl.arange(0, COUNTED)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.atomic_max(found, tl.max(tl.abs(value)))  # of the same value in any order


@triton.jit
def _cast(
    x, largest, rows, columns, scale, height, width, HIGHEST: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """A tile of [height, width], and its transpose."""
    i = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    j = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    inside = (i < height)[:, None] & (j < width)[None, :]
    value = tl.load(x + i[:, None] * width + j[None, :], mask=inside, other=0.0).to(tl.float32)
    top = tl.maximum(tl.load(largest), LEAST)
    small = (value * (HIGHEST / top)).to(rows.dtype.element_ty)
    if ROWS:
        tl.store(rows + i[:, None] * width + j[None, :], small, mask=inside)
    if COLUMNS:
        there = (j < width)[:, None] & (i < height)[None, :]
        tl.store(columns + j[:, None] * height + i[None, :], tl.trans(small), mask=there)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, top / HIGHEST)


def cast(
    x: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """X [m, k] in 8 bits, its transpose [k, m], where asked for, and the factor of both, fp32 [].

    x is contiguous. Its largest value becomes the dtype's.
    """
    height, width = x.shape
    largest = torch.zeros((), dtype=torch.float32, device=x.device)
    scale = torch.empty_like(largest)
    _largest[(triton.cdiv(x.numel(), COUNTED),)](x, largest, x.numel(), COUNTED=COUNTED)
    made = x.new_empty(height, width, dtype=dtype) if rows else None
    turned = x.new_empty(width, height, dtype=dtype) if columns else None
    some = turned if made is None else made
    _cast[triton.cdiv(width, SIDE), triton.cdiv(height, SIDE)](
        x, largest, some, turned if columns else some, scale, height, width,
        HIGHEST=torch.finfo(dtype).max, ROWS=rows, COLUMNS=columns, SIDE=SIDE,
    )  # fmt: skip
    return made, turned, scale
