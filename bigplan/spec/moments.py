"""How AdamW's moments are stored: in fp32, in bf16, or in 8 bits with a scale for each block.

In 8 bits, elements that are stored together are cut into blocks of 256, the last of which may be
shorter. A block has one fp32 scale for each moment, its largest magnitude (Dettmers et al. 2022,
arXiv 2110.02861, section 2.1). What is divided by it is at most 1, and gets a code by dynamic tree
quantisation (section 1.3): decades, of which each larger one has twice as many levels. Here the
levels of a decade are the midpoints of equal parts of it; 0 and 1 have codes of their own.

The first moment has a sign and 7 bits. The second has 8 bits, and its root is what is stored: its
values span twice as many decades as the gradients', and updates divide by those that became 0.

A piece's state lies in this order: the fp32 master if there is one, scales, all first moments, all
second moments. In fp32 moments come before the master. With Muon all elements have a first
moment, and second ones follow for those that AdamW updates, one behind the other.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Moments = Literal["fp32", "bf16", "int8"]

BLOCK = 256  # elements that share a scale
SCALE = 4  # bytes of one
ELEMENT: dict[Moments, int] = {"fp32": 4, "bf16": 2, "int8": 1}  # bytes of a moment's element
FIRST_BITS, SECOND_BITS = 7, 8  # of a magnitude's code
# Neighbouring values in bf16 are 2^-8 apart. With a larger beta1 the first moment moves by less,
# and rounding to nearest would undo every move.
MOST_BETA1 = 1 - 2.0**-8


def levels(bits: int) -> tuple[float, ...]:
    """The values of all codes of so many bits, ascending from 0 to 1.

    Decade d below 1 has 2^(bits - 1 - d) levels, the lowest two.
    """
    found = [0.0]
    for decade in reversed(range(bits - 1)):
        parts = 2 ** (bits - 1 - decade)
        found += [10.0**-decade * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
    return (*found, 1.0)


class StatePlaces(NamedTuple):
    """Where the parts of so many elements' state begin, in bytes; only 8 bits have scales."""

    master: int
    scales: tuple[int, ...]
    moments: tuple[int, ...]
    end: int


def scale_bytes(moments: Moments) -> int:
    """Bytes of a block's scales."""
    return 2 * SCALE if moments == "int8" else 0


def sharing_scales(moments: Moments) -> int:
    """Elements that share a scale: layers are cut between so many, and none is cut in two."""
    return BLOCK if moments == "int8" else 1


def blocks(elements: int) -> int:
    """Blocks of elements that are stored together."""
    return -(-elements // BLOCK)


def places(
    elements: int, moments: Moments, count: int, *, master: bool, seconds: int = 0
) -> StatePlaces:
    """Lay out the state of elements that are stored together; `count`: moments of each.

    `seconds`: so many have a second moment, besides.
    """
    size = elements * ELEMENT[moments]
    if moments == "fp32":
        end = count * size
        starts = tuple(number * size for number in range(count))
        if seconds:
            starts, end = (*starts, end), end + seconds * ELEMENT[moments]
        return StatePlaces(end, (), starts, end + 4 * elements * master)
    first = 4 * elements * master
    scales: tuple[int, ...] = ()
    if moments == "int8":
        each = SCALE * blocks(elements)
        scales = tuple(first + number * each for number in range(count))
        first += count * each
    starts = tuple(first + number * size for number in range(count))
    return StatePlaces(0, scales, starts, first + count * size)
