"""Matrices restored from 4 bits in one pass: 0.53 bytes read and 2 written an element.

runtime/four_bits.py has the format, and the same in plain torch, which moves some 50 bytes.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.runtime.four_bits import BLOCK, LEVELS

WORDS = 1024  # elements of codes that a program restores
WARPS = 4


@triton.jit
def _restored(
    codes, scales, levels, out, words,
    EACH: tl.constexpr, PER_SCALE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = word < words
    packed = tl.load(codes + word, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + word // PER_SCALE, mask=inside, other=0.0).to(tl.float32)
    place = tl.arange(0, EACH)
    code = (packed[:, None] >> (4 * place)[None, :]) & 15
    value = tl.load(levels + code) * scale[:, None]
    target = out + word[:, None] * EACH + place[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=inside[:, None])


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


def restored(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """The matrix [out, in] of contiguous codes and scales, written to contiguous `out`."""
    words, each = codes.numel(), 2 * codes.element_size()
    whole = torch.int16 if codes.element_size() == 2 else torch.int32
    _restored[(triton.cdiv(words, WORDS),)](
        codes.view(whole), scales, _levels(codes.device), out, words,
        EACH=each, PER_SCALE=BLOCK // each, WORDS=WORDS, num_warps=WARPS,
    )  # fmt: skip
    return out
