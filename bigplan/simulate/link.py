"""A link that several lanes use: each lane keeps its order, all together keep the link's rate."""

from __future__ import annotations

from bisect import bisect_left
from math import inf

# Share of a copy's seconds that rounding may leave. Without this margin, a copy that fits its gap
# exactly would end behind the next copy.
ROUNDING = 1e-9


class BusyLink:
    """When a link is busy. Copies are placed in program order; later ones fill the gaps.

    Copies of several streams take turns in pieces on a real link. So a copy whose gap is too short
    is split here, too.
    """

    def __init__(self) -> None:
        self._starts: list[float] = []  # of busy times, in order and apart
        self._ends: list[float] = []

    @property
    def end(self) -> float:
        """When the link is free for good."""
        return self._ends[-1] if self._ends else 0.0

    def shift(self, seconds: float) -> None:
        """Move all busy times by `seconds`."""
        self._starts = [start + seconds for start in self._starts]
        self._ends = [end + seconds for end in self._ends]

    def take(self, start: float, seconds: float) -> float:
        """Use the link for `seconds` from `start` on, where it is free; return the end."""
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
