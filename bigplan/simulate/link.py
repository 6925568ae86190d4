"""A link that several lanes use: each in its order, all together no faster than the link."""

from __future__ import annotations

from bisect import bisect_left
from math import inf

# Of a copy's seconds: what is left of it by rounding. A copy that fits its gap exactly would else
# end behind the next one.
ROUNDING = 1e-9


class BusyLink:
    """When a link is busy. Whoever comes first in the program goes first, others fill the gaps.

    Copies of several streams take turns in pieces; so does a copy here whose gap is too short.
    """

    def __init__(self) -> None:
        self._starts: list[float] = []  # of busy times, in order and apart
        self._ends: list[float] = []

    @property
    def end(self) -> float:
        """When it is free for good."""
        return self._ends[-1] if self._ends else 0.0

    def shift(self, seconds: float) -> None:
        """Let all of it be so much later."""
        self._starts = [start + seconds for start in self._starts]
        self._ends = [end + seconds for end in self._ends]

    def take(self, start: float, seconds: float) -> float:
        """Use the link for so many seconds from `start` on, whenever it is free; when that ends."""
        starts, spare = self._starts, ROUNDING * seconds
        first = last = bisect_left(self._ends, start)
        end, left = start, seconds
        while end + left - spare > (free := starts[last] if last < len(starts) else inf):
            left -= max(0.0, free - end)
            end = self._ends[last]
            last += 1
        end = min(end + left, free)
        if first < last:
            start = min(start, starts[first])
        starts[first:last], self._ends[first:last] = [start], [end]
        return end
