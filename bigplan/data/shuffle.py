"""A permutation of any length, one place at a time: no table of all windows in memory.

A Feistel network permutes the numbers of an even number of bits. Four rounds of a random function
cannot be told from a random permutation (Luby and Rackoff 1988). Numbers beyond the length are sent
through it again until they land within, which keeps it one to one ("cycle walking", Black and
Rogaway 2002). The domain is less than four times the length, so an average takes fewer than four
passes.
"""

from __future__ import annotations

from functools import lru_cache

ROUNDS = 8  # more than the four of the proof, because a round mixes little if bits are few
_MASK = (1 << 64) - 1


def shuffled(place: int, length: int, seed: int, epoch: int) -> int:
    """The number at `place` of the epoch's order of 0, ..., length - 1."""
    assert 0 <= place < length, (place, length)
    half = ((length - 1).bit_length() + 1) // 2 or 1
    mask, keys = (1 << half) - 1, _keys(seed, epoch)
    while True:
        left, right = place >> half, place & mask
        for each in keys:
            left, right = right, left ^ (_mixed(right ^ each) & mask)
        place = left << half | right
        if place < length:
            return place


@lru_cache(maxsize=4)  # a step has samples of one epoch or two
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    key = _mixed(_mixed(seed) ^ epoch)
    return tuple(_mixed(key + turn) for turn in range(ROUNDS))


def _mixed(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): every bit depends on all."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
