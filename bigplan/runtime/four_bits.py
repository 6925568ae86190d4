"""Frozen matrices in 4 bits: NormalFloat codes with a scale for every 64 of them (QLoRA).

Dettmers et al. 2023 (arXiv 2305.14314): 64 elements of a row are divided by their largest
magnitude, and each becomes the nearest of 16 levels that are equally probable in a normal
distribution. Their codes and then their scale are stored in elements of the compute dtype, so that
a layer of such matrices is a flat buffer like any other, which ranks may cut anywhere. An element
of b bytes holds 2 b codes, the first in its lowest bits. Scales are not quantised again: in 16 bits
a parameter takes 4.25 (QLoRA's 4.13).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from bigplan.rectangle import Rectangle
from bigplan.spec.lora import FOUR_BIT_BLOCK, packed_columns

# Appendix E of the paper.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_WORDS = {2: torch.int16, 4: torch.int32}  # by bytes of an element


def packed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks of codes and a scale [out, packed columns] in `dtype`, of [out, in]; 64 divides in."""
    rows, columns = matrix.shape
    blocks = matrix.float().view(rows, -1, FOUR_BIT_BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True).to(dtype)
    divided = blocks / scales.float().where(scales > 0, 1.0)
    # Sixteen comparisons take a tenth of a search for each element, on one core.
    codes, above = torch.zeros_like(divided, dtype=torch.uint8), divided.new_empty(0).bool()
    for lower, upper in pairwise(LEVELS):
        codes += torch.gt(divided, (lower + upper) / 2, out=above).view(torch.uint8)
    halves = codes.view(rows, -1, FOUR_BIT_BLOCK // 2, 2)  # of bytes, the lower ones first
    elements = halves[..., 1].bitwise_left_shift(4).bitwise_or_(halves[..., 0]).view(dtype)
    return torch.cat([elements, scales], -1).view(rows, packed_columns(columns, dtype.itemsize))


def unpacked(stored: Tensor) -> Tensor:
    """The matrix [out, in] that `packed` made these of, but for what was lost; in plain torch."""
    each = 2 * stored.element_size()
    blocks = stored.view(len(stored), -1, FOUR_BIT_BLOCK // each + 1)
    words = blocks[..., :-1].contiguous().view(_WORDS[stored.element_size()]).int()[..., None]
    codes = (words.expand(*words.shape[:-1], each) >> _shifts(words.new_empty(each))) & 15
    values = torch.tensor(LEVELS, device=stored.device)[codes.flatten(-2)]
    return (values * blocks[..., -1:].float()).to(stored.dtype).flatten(1)


def _shifts(words: Tensor) -> Tensor:
    return 4 * torch.arange(words.shape[-1], device=words.device, dtype=torch.int32)


def unstored(part: Rectangle, dtype: torch.dtype) -> Rectangle:
    """The part of a matrix, in whole blocks, that a rectangle of what is stored is made of."""
    size = packed_columns(FOUR_BIT_BLOCK, dtype.itemsize)
    first, last = part.first_column // size, -(-part.last_column // size)
    columns = first * FOUR_BIT_BLOCK, last * FOUR_BIT_BLOCK
    return Rectangle(part.parameter, part.first_row, part.last_row, *columns)


def part_of(blocks: Tensor, part: Rectangle) -> Tensor:
    """The columns of packed blocks that the rectangle has, the first of which begins in a block."""
    skipped = part.first_column % packed_columns(FOUR_BIT_BLOCK, blocks.element_size())
    return blocks[:, skipped : skipped + part.columns]
