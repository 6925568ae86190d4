"""Random bits that are a function of whole numbers alone: the same wherever they are asked for."""

from __future__ import annotations

from torch import Tensor

WORD = 0xFFFFFFFF
# The mixing of Chris Wellons' lowbias32.
MIX_FIRST, MIX_SECOND = 0x7FEB352D, 0x846CA68B


def mixed(words: Tensor) -> Tensor:
    """32 random bits for each whole number, of which the lower 32 bits count: int64, as given.

    Two numbers that differ in these bits never give the same.
    """
    words = words & WORD
    words = (words ^ words >> 16) * MIX_FIRST & WORD
    words = (words ^ words >> 15) * MIX_SECOND & WORD
    return words ^ words >> 16
