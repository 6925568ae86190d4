"""A time budget that probes share, and medians that keep to a time limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

ReadClock = Callable[[], float]

# Runs are timed in batches of at least so many seconds: between two events a single kernel of 10 us
# is mostly its launch.
SAMPLE_SECONDS = 2e-3
MOST_SAMPLES = 50


@dataclass(slots=True)
class TimeBudget:
    """`seconds` from the budget's creation on, handed out by weight."""

    seconds: float
    clock: ReadClock = time.perf_counter
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._end = self.clock() + self.seconds

    @property
    def left(self) -> float:
        """Seconds that are left, never below zero."""
        return max(0.0, self._end - self.clock())

    def allot(self, weight: float, waiting: float) -> float:
        """Seconds for the next of the waiting probes, whose weights add up to `waiting`.

        Time that a probe left over or overran is shared by all later probes.
        """
        assert 0 < weight <= waiting * (1 + 1e-9), (weight, waiting)
        return self.left * weight / waiting


def median_seconds(
    timed: Callable[[int], float],
    seconds: float,
    clock: ReadClock = time.perf_counter,
    middle: Callable[[Sequence[float]], float] = statistics.median,
) -> float:
    """Median seconds of one run, measured for about `seconds`.

    `timed(n)` runs n times and returns how long that took. `middle` may replace the median. Two
    runs come first: one warms up (code is loaded, workspaces are taken), one shows how many runs
    make a sample. If these two use up the time, the second is the result.
    """
    end = clock() + seconds
    timed(1)
    once = timed(1)
    batch = max(1, min(1000, ceil(SAMPLE_SECONDS / max(once, 1e-9))))
    times: list[float] = []
    while len(times) < MOST_SAMPLES and clock() + batch * once <= end:
        times.append(timed(batch) / batch)
    return middle(times) if times else once
