"""A step played on all stages: with its events, or only how long it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bigplan.cost import Costs
from bigplan.graph.graph import Graph
from bigplan.program import Program
from bigplan.simulate.rank import Rank, priced_anew, ranks_of, run
from bigplan.simulate.rounds import play_steady
from bigplan.timeline import Event, Timeline


def simulate(programs: Sequence[Program], graph: Graph, costs: Costs) -> Timeline:
    """One steady step of every stage, messages between neighbours matched.

    Raises VerificationError where stages wait for each other for ever.
    """
    events: list[Event] = []
    run(ranks_of(programs, graph, costs, events))
    # The search's own sum: where repetitions are skipped, sums round in another order.
    return Timeline(tuple(events), step_seconds(programs, graph, costs))


def step_seconds(programs: Sequence[Program], graph: Graph, costs: Costs) -> float:
    """The seconds of `simulate`'s timeline, up to rounding, without its events.

    Raises VerificationError where stages wait for each other for ever.
    """
    return next(steps_seconds(programs, graph, [costs]))


def steps_seconds(
    programs: Sequence[Program], graph: Graph, prices: Iterable[Costs]
) -> Iterator[float]:
    """Seconds at each of several prices; ranks and segments are made once for all.

    Prices may differ in what no action does; then nothing is played again.
    """
    ranks: list[Rank] = []
    seconds = 0.0
    for costs in prices:
        before = [rank.segments for rank in ranks]
        ranks = priced_anew(ranks, graph, costs) if ranks else ranks_of(programs, graph, costs)
        if before != [rank.segments for rank in ranks]:
            seconds = last_end(ranks)
        yield seconds


def last_end(ranks: list[Rank]) -> float:
    """The end of the step, played with its steady repetitions skipped."""
    play_steady(ranks)
    run(ranks)
    return max((clock for rank in ranks for clock in rank.clocks), default=0.0)
