"""Matrices unpacked from 4 bits in one pass: 0.53 bytes read and 2 written an element.

spec/four_bits.py has the format; plain torch (runtime/linear/four_bits.py) moves 36 bytes.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.spec.four_bits import BLOCK, LEVELS

WORDS = 1024  # elements with codes that a program unpacks
WARPS = 4


@triton.jit
def _unpacked(
    stored, scales, levels, out, words, EACH: tl.constexpr, PER: tl.constexpr, WORDS: tl.constexpr
):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = word < words
    block = word // PER
    codes = tl.load(stored + word + block, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + block * (PER + 1) + PER, mask=inside, other=0.0).to(tl.float32)
    place = tl.arange(0, EACH)
    code = (codes[:, None] >> (4 * place)[None, :]) & 15
    value = tl.load(levels + code) * scale[:, None]
    target = out + word[:, None] * EACH + place[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=inside[:, None])


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


def unpacked(stored: Tensor) -> Tensor:
    """The matrix [out, in] of contiguous packed blocks [out, packed columns]."""
    each = 2 * stored.element_size()
    per = BLOCK // each
    blocks = stored.numel() // (per + 1)
    out = stored.new_empty(len(stored), blocks // len(stored) * BLOCK)
    whole = torch.int16 if stored.element_size() == 2 else torch.int32
    words = blocks * per
    _unpacked[(triton.cdiv(words, WORDS),)](
        stored.view(whole), stored, _levels(stored.device), out, words,
        EACH=each, PER=per, WORDS=WORDS, num_warps=WARPS,
    )  # fmt: skip
    return out
