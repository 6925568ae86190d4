"""Matrices in MXFP4 as published GPT-OSS files have them, read as bf16.

The OCP Microscaling Formats specification 1.0 (2023): 32 elements of 4 bits (E2M1) share a power of
two (E8M0). A byte holds two elements, the first in its lower bits. A product of both is exact in
bf16, whose exponents reach as far.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 32  # elements that share a scale
BIAS = 127  # of a scale's exponent
# By sign, two bits of exponent and one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEVELS = (*_MAGNITUDES, *(-one for one in _MAGNITUDES))


class Packed(NamedTuple):
    """One matrix [in, out]: the blocks and scales of its columns lie together."""

    blocks: Tensor  # uint8 [out, in / 32, 16]
    scales: Tensor  # uint8 [out, in / 32]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.blocks.shape[1] * BLOCK, self.blocks.shape[0]

    def part(self, inner: slice, outer: slice) -> Tensor:
        """Rows and columns of the matrix, bf16; no more blocks are opened than hold them."""
        first, last = inner.start // BLOCK, -(-inner.stop // BLOCK)
        values = opened(self.blocks[outer, first:last], self.scales[outer, first:last])
        return values[:, inner.start - first * BLOCK : inner.stop - first * BLOCK].T


def opened(blocks: Tensor, scales: Tensor) -> Tensor:
    """The elements of blocks uint8 [..., n, 16] with scales uint8 [..., n]: bf16 [..., 32 n]."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    powers = torch.exp2(scales.float() - BIAS)[..., None]
    return (torch.tensor(LEVELS)[codes] * powers).bfloat16().flatten(-2)
