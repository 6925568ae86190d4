"""Matrices packed in 4 bits and unpacked; spec/four_bits.py has the format."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from bigplan.rectangle import Rectangle
from bigplan.runtime.cpu.native import native
from bigplan.spec.four_bits import BLOCK, LEVELS, packed_columns

# A value's code is the number of these that it is above, once divided by its block's scale.
BOUNDS = tuple((lower + upper) / 2 for lower, upper in pairwise(LEVELS))
_WORDS = {2: torch.int16, 4: torch.int32}  # by bytes of an element


def packed(matrix: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Blocks of codes and a scale [out, packed columns] in `dtype`, of [out, in]; 64 divides in.

    In one pass, by one core, where there is a compiler; elsewhere through torch, the same bits.
    """
    rows, columns = matrix.shape
    if out is None:
        out = torch.empty(
            rows, packed_columns(columns, dtype.itemsize), dtype=dtype, device=matrix.device
        )
    library = native() if matrix.device.type == "cpu" else None
    if library and library.takes(matrix) and library.takes(out):
        library.pack(matrix.contiguous(), BOUNDS, out)
    else:
        out.copy_(_packed(matrix, dtype))
    return out


def _packed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = matrix.shape
    blocks = matrix.float().view(rows, -1, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True).to(dtype)
    divided = blocks / scales.float().where(scales > 0, 1.0)
    # Fifteen comparisons take a tenth of a search for each element, on one core.
    codes, above = torch.zeros_like(divided, dtype=torch.uint8), divided.new_empty(0).bool()
    for bound in BOUNDS:
        codes += torch.gt(divided, bound, out=above).view(torch.uint8)
    halves = codes.view(rows, -1, BLOCK // 2, 2)  # of bytes, the lower ones first
    elements = halves[..., 1].bitwise_left_shift(4).bitwise_or_(halves[..., 0]).view(dtype)
    return torch.cat([elements, scales], -1).view(rows, packed_columns(columns, dtype.itemsize))


def unpacked(stored: Tensor) -> Tensor:
    """The matrix [out, in] that `packed` made these of, but for what was lost; in plain torch."""
    each = 2 * stored.element_size()
    blocks = stored.view(len(stored), -1, BLOCK // each + 1)
    words = blocks[..., :-1].contiguous().view(_WORDS[stored.element_size()]).int()[..., None]
    codes = (words.expand(*words.shape[:-1], each) >> _shifts(words.new_empty(each))) & 15
    values = torch.tensor(LEVELS, device=stored.device)[codes.flatten(-2)]
    return (values * blocks[..., -1:].float()).to(stored.dtype).flatten(1)


def _shifts(words: Tensor) -> Tensor:
    return 4 * torch.arange(words.shape[-1], device=words.device, dtype=torch.int32)


def unstored(part: Rectangle, dtype: torch.dtype) -> Rectangle:
    """The part of a matrix, in whole blocks, that a rectangle of what is stored is made of."""
    size = packed_columns(BLOCK, dtype.itemsize)
    first, last = part.first_column // size, -(-part.last_column // size)
    columns = first * BLOCK, last * BLOCK
    return Rectangle(part.parameter, part.first_row, part.last_row, *columns)


def part_of(blocks: Tensor, part: Rectangle) -> Tensor:
    """The columns of packed blocks that the rectangle has, the first of which begins in a block."""
    skipped = part.first_column % packed_columns(BLOCK, blocks.element_size())
    return blocks[:, skipped : skipped + part.columns]
