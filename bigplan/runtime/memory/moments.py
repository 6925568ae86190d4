"""State of elements that are stored together, and moments coded in 8 bits; spec/moments.py has the
format.

Moments are updated in fp32 and then rounded: the first to nearest. The second would stand still so:
with beta2 of 0.999 it changes by less than 0.001 of itself, where bf16's neighbours are 0.004 to
0.008 apart and those of 8 bits more. So it is rounded up or down at random, such that its mean is
right. What is random is a hash of the element's own values and the step: a run that goes on, or is
cut in another way, draws the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from bigplan.runtime.hashing import mixed
from bigplan.spec.moments import BLOCK, FIRST_BITS, SECOND_BITS, Moments, blocks, levels, places
from bigplan.spec.optimizer import Optimizer

# Of the hash: odd factors of its three values.
OF_PARAMETER, OF_GRADIENT, OF_STEP = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_CODES: dict[Moments, tuple[torch.dtype, torch.dtype]] = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.uint8),
}

View = Callable[[torch.dtype, int, int], Tensor]  # so many elements from a byte on


class StoredState(NamedTuple):
    """Views of the moments of so many elements, of their blocks' scales, and of their master."""

    moments: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    master: Tensor | None

    @classmethod
    def of(
        cls, view: View, elements: int, optimizer: Optimizer, *, master: bool, seconds: int = 0
    ) -> StoredState:
        """The parts of stored bytes; `seconds`: as in spec.moments.places."""
        at = places(elements, optimizer.moments, optimizer.kept, master=master, seconds=seconds)
        kinds = _CODES[optimizer.moments]
        counts = (elements, seconds or elements)
        return cls(
            tuple(
                view(kind, count, start)
                for kind, count, start in zip(kinds, counts, at.moments, strict=False)
            ),
            tuple(view(torch.float32, blocks(elements), start) for start in at.scales),
            view(torch.float32, elements, at.master) if master else None,
        )


def bytes_view(stored: Tensor) -> View:
    """Views of 1-D bytes."""
    return lambda dtype, count, start: stored[start : start + count * dtype.itemsize].view(dtype)


@cache
def _levels(bits: int, device: torch.device) -> Tensor:
    return torch.tensor(levels(bits), device=device)


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """What codes [n] stand for, fp32: a first moment of int8, or a second one's root of uint8.

    `scales` are of each element, or of all.
    """
    signed = codes.dtype == torch.int8
    magnitudes = _levels(FIRST_BITS if signed else SECOND_BITS, codes.device)
    found = magnitudes[codes.abs().long() if signed else codes.long()]
    return (found * codes.sign() if signed else found) * scales


def of_elements(scales: Tensor, elements: int) -> Tensor:
    """Each element's scale, of those of blocks."""
    return scales.repeat_interleave(BLOCK)[:elements]


def largest(values: Tensor) -> Tensor:
    """The scale of each block of values [n]: their largest magnitude."""
    whole = torch.nn.functional.pad(values.abs(), (0, -len(values) % BLOCK))
    return whole.view(-1, BLOCK).amax(1)


def _decade(parts: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """How far values up to 1 lie in their decade, in its levels, and how many levels it has."""
    value, width = parts, torch.full_like(parts, 2.0 ** (bits - 1))
    for _ in range(bits - 2):
        low = value < 0.1
        value, width = torch.where(low, value * 10, value), torch.where(low, width / 2, width)
    return (value - 0.1) * (1 / 0.9) * width, width


def nearest(values: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Codes of magnitudes' nearest levels, int32; at a decade's lower end up to half a level off.

    What `decoded` gave gets the codes that it was made of.
    """
    parts = values / torch.where(scales > 0, scales, 1.0)
    place, width = _decade(parts, bits)
    last = 2**bits - 1
    codes = torch.floor(place + (width - 1)).clamp(0, last - 1).int()
    return torch.where(parts >= 1 - 0.225 / 2 ** (bits - 1), last, codes)


def nearest_first(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of first moments [n], which begin with a block."""
    scales = largest(values)
    codes = nearest(values.abs(), of_elements(scales, len(values)), FIRST_BITS)
    return (codes * values.sign().int()).to(torch.int8), scales


def nearest_second(roots: Tensor) -> tuple[Tensor, Tensor]:
    """The same of second moments' roots."""
    scales = largest(roots)
    codes = nearest(roots, of_elements(scales, len(roots)), SECOND_BITS)
    return codes.to(torch.uint8), scales


def rounded_second(roots: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of second moments by their roots [n]: the level below or above each.

    The moment's mean over `chances`, which are even in [0, 1), is right. What is not 0 does not
    become 0, as updates divide by it.
    """
    scales = largest(roots)
    each = of_elements(scales, len(roots))
    parts = roots / torch.where(each > 0, each, 1.0)
    place, width = _decade(parts, SECOND_BITS)
    last = 2**SECOND_BITS - 1
    below = torch.floor(place + (width - 1.5)).clamp(0, last - 1).int()
    table = _levels(SECOND_BITS, roots.device)
    low, high = table[below.long()], table[below.long() + 1]
    up = chances * (high * high - low * low) < parts * parts - low * low
    up |= (below == 0) & (parts > 0)
    return (below + up.int()).to(torch.uint8), scales


def drawn(parameter: Tensor, gradient: Tensor, step: int) -> Tensor:
    """32 random bits for each element, int64, by its fp32 parameter and gradient and the step."""
    words = parameter.view(torch.int32).long() * OF_PARAMETER
    return mixed(words + gradient.view(torch.int32).long() * OF_GRADIENT + step * OF_STEP)


def rounded_bf16(values: Tensor, words: Tensor) -> Tensor:
    """Values of 0 and more in bf16, up or down by the lower half of random words."""
    bits = values.view(torch.int32).long() + (words & 0xFFFF)
    return (bits >> 16 << 16).int().view(torch.float32).to(torch.bfloat16)
