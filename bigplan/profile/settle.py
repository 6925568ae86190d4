"""When a rate has stopped changing: how long a GPU needs load until its clock is the sustained one.

A GPU that was idle runs fast until its power limit and its temperature bring the clock down: one
H200 multiplied at 685 TFLOP/s in bursts and at 667 after ten seconds
(benchmarks/results/2026-11-21-h200-kernels). The rate itself says when that is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from bigplan.profile.budget import ReadClock

WINDOWS = 6  # the mean of so many is compared with that of as many before them
TOLERANCE = 0.005  # relative: that H200's rates varied by as much when they no longer fell


def settled(rates: Sequence[float], windows: int = WINDOWS, tolerance: float = TOLERANCE) -> bool:
    """Whether the rates of successive windows, all positive, have stopped falling and rising.

    The mean of the last `windows` is compared with that of as many before; it never is with fewer.
    Of a fall that at least halves from one such group to the next, no more than about `tolerance`
    is then still to come.
    """
    if len(rates) < 2 * windows:
        return False
    last, before = fmean(rates[-windows:]), fmean(rates[-2 * windows : -windows])
    return abs(last / before - 1) <= tolerance


def until_settled(rates: Iterator[float], seconds: float, clock: ReadClock) -> tuple[float, ...]:
    """The rates taken from `rates`, each a window's, until they settle or `seconds` are over."""
    end = clock() + seconds
    taken: list[float] = []
    while not settled(taken) and clock() < end:
        taken.append(next(rates))
    return tuple(taken)
