"""Random bits of whole numbers within kernels, those of runtime/hashing.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(word):
    """32 random bits for each number, uint32."""
    word = (word ^ (word >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    word = (word ^ (word >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return word ^ (word >> 16)
