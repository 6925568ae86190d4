"""The critical path of a step: the chain of actions that its seconds were spent on.

An action begins when the last of its causes ends: the action before it in its lane, or one that it
depends on. So a chain without gaps leads from the end of the step back to its beginning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence

from bigplan.cost import Costs
from bigplan.graph.graph import Graph
from bigplan.program import Action, Program
from bigplan.simulate.moment import Moment, Skipped
from bigplan.simulate.play import last_end
from bigplan.simulate.rank import ranks_of, run
from bigplan.simulate.seconds import by_resource
from bigplan.timeline import Event


def critical_path(programs: Sequence[Program], graph: Graph, costs: Costs) -> dict[str, float]:
    """Seconds on the critical path by resource, most first; they add up to the step.

    The waits of forwards and backwards are told apart from the GPU's compute. Raises
    VerificationError where stages wait for each other for ever.
    """
    taken: dict[int, tuple[Action, int, float]] = {}  # by an action's identity, times and seconds
    for action, seconds in _walk_back(last_end(ranks_of(programs, graph, costs, traced=True))):
        _, times, before = taken.get(id(action), (action, 0, 0.0))
        taken[id(action)] = action, times + 1, before + seconds
    spent: dict[str, float] = defaultdict(float)
    for action, times, seconds in taken.values():
        for name, part in by_resource(action, seconds, graph, costs, times).items():
            spent[name] += part
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    return {name: seconds for name, seconds in ordered if seconds > 0}


def critical_events(
    programs: Sequence[Program], graph: Graph, costs: Costs
) -> tuple[tuple[Event, ...], frozenset[int]]:
    """Every event of the step, in the order of `simulate`, and which of them are on the path.

    Nothing is skipped, so that each event has its own times. Raises VerificationError where stages
    wait for each other for ever.
    """
    events: list[Event] = []
    ranks = ranks_of(programs, graph, costs, events, traced=True)
    run(ranks)
    # Each end is an object of its own, and whoever waited for an end keeps that very object.
    numbers = {id(event.end): number for number, event in enumerate(events)}
    moment = max((clock for rank in ranks for clock in rank.clocks), default=0.0)
    path: set[int] = set()
    while isinstance(moment, Moment):
        if id(moment) in numbers:  # FREE is an action without an event
            path.add(numbers[id(moment)])
        moment = moment.before
    return tuple(events), frozenset(path)


def _walk_back(end: float) -> Iterator[tuple[Action, float]]:
    """The actions that led to `end`, last first, and how long each of them took."""
    moment = end
    while isinstance(moment, Moment):
        if isinstance(moment.cause, Skipped):
            moment = yield from _walk_skipped(moment.cause, moment.before)
        else:
            yield moment.cause, moment - moment.before
            moment = moment.before


def _walk_skipped(skipped: Skipped, end: float) -> Generator[tuple[Action, float], None, float]:
    """Walk back through repetitions that were not played, to the end of the one before them.

    Each skipped repetition is the last played one again, from the time at which the repetition
    before it ended. So the walk goes through the played one again, from that time's successor.
    """
    moment = end
    for _ in range(skipped.rounds):
        while (successor := skipped.successor(moment)) is None:
            assert isinstance(moment, Moment), "steady repetitions depend on each other alone"
            assert isinstance(moment.cause, Action), "repetitions are skipped once"
            yield moment.cause, moment - moment.before
            moment = moment.before
        moment = successor
    return moment
