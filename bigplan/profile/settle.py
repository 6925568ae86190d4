"""When a rate has stopped changing: how long a GPU needs load until its clock is the sustained one.

A GPU that was idle runs fast until its power limit and its temperature bring the clock down: one
H200 multiplied at 685 TFLOP/s in bursts and at 667 after ten seconds
(benchmarks/results/2026-11-21-h200-kernels). The rate itself shows when the clock is steady.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from bigplan.profile.budget import ReadClock

WINDOWS = 6  # the mean of so many is compared with that of as many before them
TOLERANCE = 0.005  # relative: that H200's rates still varied by as much once they no longer fell


def settled(rates: Sequence[float], windows: int = WINDOWS, tolerance: float = TOLERANCE) -> bool:
    """Whether the rates of successive windows, all positive, have stopped falling and rising.

    The mean of the last `windows` rates is compared with that of as many rates before; with fewer
    rates the answer is no. If a fall at least halves from one such group to the next, the rate will
    fall by no more than about another `tolerance`.
    """
    if len(rates) < 2 * windows:
        return False
    last, before = fmean(rates[-windows:]), fmean(rates[-2 * windows : -windows])
    return abs(last / before - 1) <= tolerance


def until_settled(rates: Iterator[float], seconds: float, clock: ReadClock) -> tuple[float, ...]:
    """Rates of windows, taken from `rates` until they settle or `seconds` are over."""
    end = clock() + seconds
    taken: list[float] = []
    while not settled(taken) and clock() < end:
        taken.append(next(rates))
    return tuple(taken)
