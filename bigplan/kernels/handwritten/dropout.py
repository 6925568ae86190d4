"""Dropout of what low-rank adapters read (runtime/linear/dropout.py): one pass, no mask in memory.

By torch's operators the words of a mask take a dozen passes over 8 bytes an element. Here they are
made in registers, beside the load of x.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.kernels.handwritten.hashing import mixed

ROWS, COLUMNS = 8, 512  # of a program


@triton.jit(do_not_specialize=["of_rows", "of_columns", "least", "row", "column", "start"])
def _dropped(
    x, out, first, of_rows, of_columns, least, row, column, length, start, rows, columns,
    ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows' columns."""
    i, j = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS
    j += tl.arange(0, COLUMNS)
    number = (i + row).to(tl.int64)
    sequence, position = tl.load(first) + number // length, number % length + start
    word = sequence.to(tl.uint32) * tl.full((), 0x9E3779B1, tl.uint32) + of_rows.to(tl.uint32)
    word = mixed(mixed(word) + position.to(tl.uint32) * tl.full((), 0x85EBCA77, tl.uint32))
    beside = (j + column).to(tl.uint32) * tl.full((), 0xC2B2AE3D, tl.uint32)
    beside = mixed(beside + of_columns.to(tl.uint32))
    stays = mixed(word[:, None] + beside[None, :]) >= least.to(tl.uint32)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    at = i.to(tl.int64)[:, None] * columns + j[None, :]
    # One mask for both would have each element loaded by itself.
    value = tl.where(stays, tl.load(x + at, mask=inside, other=0.0), 0.0)
    if ADDS:
        total = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) + value.to(tl.float32)
        value = total
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def dropped(x: Tensor, draw: tuple[Any, ...], into: Tensor | None = None) -> Tensor:
    """X [rows, columns] with zeros for what is dropped; `into`, contiguous: added to that."""
    first, (of_rows, of_columns), least, row, column, length, start = draw
    x = x.contiguous()
    out = torch.empty_like(x) if into is None else into
    (rows, columns), width = x.shape, min(COLUMNS, triton.next_power_of_2(x.shape[1]))
    _dropped[triton.cdiv(rows, ROWS), triton.cdiv(columns, width)](
        x, out, first, of_rows, of_columns, least, row, column, length, start, rows, columns,
        ADDS=into is not None, ROWS=ROWS, COLUMNS=width,
    )  # fmt: skip
    return out
