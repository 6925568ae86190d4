"""A plan's steady step, played again for its pages and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bigplan.cost.framework import NATIVE
from bigplan.engines import engine_of
from bigplan.page.occupancy import Level, levels
from bigplan.plan import MemoryUse, Plan
from bigplan.planner import programs_of
from bigplan.simulate import critical_events
from bigplan.timeline import Event, Timeline

CLOSE = 1e-9  # of the step: moments that are closer count as one
PROCESSES = "processes"  # host memory of Python, CUDA and Ray, which no buffer of a program holds


@dataclass(frozen=True)
class Played:
    """The step's events, which of them are on the critical path, and what memory they fill.

    `whole` is False where only the events are known, as for engines that run no program of actions.
    Then memory counts as filled to its largest use all the time.
    """

    seconds: float
    events: tuple[Event, ...]
    critical: frozenset[int]
    levels: tuple[Level, ...]
    whole: bool


def played(plan: Plan) -> Played:
    """The plan's step. Raises InputError where this version lacks the plan's engine."""
    seconds, memory = plan.predicted.step_seconds, plan.predicted.memory
    if plan.engine != NATIVE.name:
        events = engine_of(plan).timeline(plan).events
        return replace(of_events(plan, Timeline(events, seconds)), critical=chain(events))
    candidate, programs = programs_of(plan)
    costs = candidate.costs
    events, critical = critical_events(programs, candidate.graph, costs)
    found = levels(programs, events, seconds, costs.ranks_per_node)
    for use in memory:
        beside = {name: n for name, n in use.by_purpose.items() if name == PROCESSES}
        found += _still(use, beside, seconds)
    return Played(seconds, events, critical, tuple(found), whole=True)


def chain(events: Sequence[Event]) -> frozenset[int]:
    """The critical path of events that were priced one after the other, by index.

    It leads back from the last end. Before each event comes the one that ends last among those that
    have ended by its start. Such a price knows no more about what waits for what.
    """
    found, start = list[int](), float("inf")
    slack = CLOSE * max((event.end for event in events), default=0.0)
    for number in sorted(range(len(events)), key=lambda n: -events[n].end):
        if events[number].end <= start + slack:
            found.append(number)
            start = events[number].start
    return frozenset(found)


def of_events(plan: Plan, timeline: Timeline) -> Played:
    """A step whose events alone are known."""
    still = tuple(
        level
        for use in plan.predicted.memory
        for level in _still(use, use.by_purpose, timeline.seconds)
    )
    return Played(timeline.seconds, timeline.events, frozenset(), still, whole=False)


def _still(use: MemoryUse, purposes: Mapping[str, int], seconds: float) -> list[Level]:
    """Levels that do not change over the step."""
    return [
        Level(use.stage, use.tier, purpose, 0.0, seconds, nbytes)
        for purpose, nbytes in purposes.items()
    ]
