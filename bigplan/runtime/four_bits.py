"""Frozen matrices in 4 bits: NormalFloat codes with a scale for every 64 of them (QLoRA).

Dettmers et al. 2023 (arXiv 2305.14314): a block is divided by its largest magnitude, and each
element becomes the nearest of 16 levels that are equally probable in a normal distribution. Codes
and scales are stored as elements of the compute dtype, so that a layer with such matrices is a flat
buffer like any other: an element of b bytes holds 2 b codes, the first in its lowest bits. Scales
are not quantised again, so a parameter takes 4.25 bits in 16-bit precision (QLoRA's: 4.13).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # elements of a row that share a scale
# Appendix E of the paper.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_WORDS = {2: torch.int16, 4: torch.int32}  # that hold the codes, by bytes of an element


def quantised(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [out, in / (2 b)] and scales [out, in / 64] in `dtype` (of b bytes), of [out, in].

    `in` is a multiple of 64.
    """
    rows, columns = matrix.shape
    blocks = matrix.float().view(rows, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(-1).to(dtype)
    divisors = scales.float().where(scales > 0, 1.0)
    middles = torch.tensor(LEVELS, device=matrix.device)
    middles = (middles[1:] + middles[:-1]) / 2
    codes = torch.bucketize(blocks / divisors[..., None], middles).to(torch.int64)
    each = 2 * dtype.itemsize
    shifts = 4 * torch.arange(each, device=matrix.device)
    words = (codes.view(rows, columns // each, each) << shifts).sum(-1)
    # The highest bit of a word is a sign: what does not fit below it counts as negative.
    bits = 4 * each
    signed = torch.where(words >= 1 << (bits - 1), words - (1 << bits), words)
    return signed.to(_WORDS[dtype.itemsize]).view(dtype), scales


def restored(codes: Tensor, scales: Tensor) -> Tensor:
    """The matrix [out, in] of what `quantised` gives, in its dtype, in plain torch."""
    each = 2 * codes.element_size()
    shifts = 4 * torch.arange(each, device=codes.device, dtype=torch.int32)
    words = codes.view(_WORDS[codes.element_size()]).to(torch.int32)
    levels = torch.tensor(LEVELS, device=codes.device)
    values = levels[((words[..., None] >> shifts) & 15).long()].view(*scales.shape, BLOCK)
    return (values * scales.float()[..., None]).to(codes.dtype).flatten(1)
