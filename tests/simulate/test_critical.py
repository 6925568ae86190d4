"""The critical path: seconds that add up to the step, of actions that really follow each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bigplan.cost import Costs, GpuWaits, KindCost
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower
from bigplan.placement import Tier
from bigplan.program import Lane
from bigplan.simulate import (
    COLLECTIVES,
    LAUNCHING,
    busy_seconds,
    critical_events,
    critical_path,
    simulate,
    step_seconds,
)
from bigplan.simulate.rank import ranks_of, run
from bigplan.simulate.rounds import play_steady
from bigplan.timeline import Event
from bigplan.units import PerRank
from tests.examples import examples
from tests.simulate.test_simulate import FAST, IDEAL, PASSES, TINY, unstreamed
from tests.toys import COSTS, Case, cases, kind_placement, placed, toy_graph

ON_GPU = (Lane.COMPUTE, Lane.GPU_UPDATE)


@settings(max_examples=examples(60))
@given(cases(free=True), st.integers(0, 40))
def test_the_seconds_add_up_to_the_step(case: Case, more: int) -> None:
    group = case.graph.strategy.accumulation_group
    graph = replace(case.graph, micro_batches=case.graph.micro_batches + more * group)
    programs = lower(graph, case.placement)
    path = critical_path(programs, graph, case.costs)
    # Shifts equal to 1e-9 are taken for equal, in up to 50 repetitions.
    assert sum(path.values()) == pytest.approx(step_seconds(programs, graph, case.costs), rel=1e-7)
    busy = busy_seconds(programs, graph, case.costs)
    assert set(path) <= set(busy)
    assert list(path.values()) == sorted(path.values(), reverse=True)


FACTORS = st.sampled_from((0.25, 0.5, 1.0, 2.0, 8.0))


def _slower(costs: Costs, gpu: float, read: float, write: float, send: float) -> Costs:
    """Prices at which whatever the GPU computes takes `gpu` times as long, and so on."""
    rates, (lent, back) = costs.rates, costs.table
    kinds = {
        name: replace(
            kind,
            forward=kind.forward * gpu,
            backward=kind.backward * gpu,
            reruns={recompute: seconds * gpu for recompute, seconds in kind.reruns.items()},
        )
        for name, kind in costs.kinds.items()
    }
    return replace(
        costs,
        kinds=kinds,
        send=costs.send * send,
        table=(lent * send, back * send),
        rates=replace(
            rates,
            gpu_update=PerRank(rates.gpu_update / gpu),
            device_memory=PerRank(rates.device_memory / gpu),
            nvme_read=PerRank(rates.nvme_read / read),
            nvme_write=PerRank(rates.nvme_write / write),
        ),
    )


def _lent_table() -> Case:
    """An interleaved pipeline whose table's messages alone bind: they are sends like others."""
    graph = toy_graph(Strategy(dp=1, pp=2, vpp=2), blocks=4, units=2, tied=True)
    return Case(graph, replace(COSTS, table=(3.0, 5.0)), placed(graph))


@example(_lent_table(), 0, (0.25, 0.25, 0.25, 8.0))
@settings(max_examples=examples(100))
@given(cases(free=True), st.integers(0, 40), st.tuples(FACTORS, FACTORS, FACTORS, FACTORS))
def test_it_is_a_path_of_the_same_step_at_other_prices(
    case: Case, more: int, factors: tuple[float, float, float, float]
) -> None:
    """A chain of actions that follow each other takes no longer than the step, at any prices."""
    group = case.graph.strategy.accumulation_group
    graph = replace(case.graph, micro_batches=case.graph.micro_batches + more * group)
    programs = lower(graph, unstreamed(case.placement))
    path = critical_path(programs, graph, case.costs)
    costs = _slower(case.costs, *factors)
    gpu, read, write, send = factors
    slower: dict[str, float] = {
        **dict.fromkeys(ON_GPU, gpu),
        Lane.NVME_READ: read,
        Lane.NVME_WRITE: write,
        Lane.SEND: send,
    }
    chain = sum(seconds * slower.get(name, 1.0) for name, seconds in path.items())
    assert step_seconds(programs, graph, costs) >= chain * (1 - 1e-7)


def test_a_forward_at_the_pace_of_its_link_is_bound_by_it() -> None:
    # Four loads of 2 s, the last block's forward and its backward, and of the backwards of the
    # others those that wait for nothing (see test_prefetch_into_slots).
    graph = toy_graph(blocks=4, units=1, deferred=False)
    streamed = kind_placement(4, Tier.HOST, optimizer=Tier.HOST)
    costs = replace(IDEAL, rates=replace(FAST, h2d=PerRank(36.0)))
    path = critical_path(lower(graph, placed(graph, block=streamed)), graph, costs)
    assert path[Lane.H2D] == pytest.approx(8, abs=TINY)
    assert path[Lane.COMPUTE] == pytest.approx(9, abs=TINY)
    assert next(iter(path)) == Lane.COMPUTE


def test_the_path_of_a_pipeline_goes_through_all_of_its_stages() -> None:
    graph = toy_graph(Strategy(dp=1, pp=4), blocks=4, units=40)
    path = critical_path(lower(graph, placed(graph)), graph, replace(IDEAL, send=0.25))
    # There to the last stage and back, and again before every unit that waits for the one ahead.
    assert path[Lane.SEND] >= 2 * 3 * 0.25 - TINY
    assert path[Lane.COMPUTE] + path[Lane.SEND] == pytest.approx(sum(path.values()), abs=TINY)


def test_what_the_gpu_waits_for_within_a_pass_is_told_apart() -> None:
    waiting = KindCost(
        1,
        2,
        reruns={Recompute.FULL: 0.75},
        forward_waits=GpuWaits(0.25, 0.125),
        backward_waits=GpuWaits(0.5, 0.0),
        rerun_waits={Recompute.FULL: GpuWaits(0.25, 0.0625)},
    )
    costs = replace(IDEAL, kinds={**PASSES, "block": waiting})
    graph = toy_graph(blocks=4, units=2)
    again = kind_placement(4, activations=(Recompute.FULL, Tier.GPU))
    programs = lower(graph, placed(graph, block=again))
    path, busy = critical_path(programs, graph, costs), busy_seconds(programs, graph, costs)
    for told in (path, busy):
        assert told[COLLECTIVES] == pytest.approx(8 * (0.25 + 0.5 + 0.25))
        assert told[LAUNCHING] == pytest.approx(8 * (0.125 + 0.0625))
        apart = told[COLLECTIVES] + told[LAUNCHING]
        assert told[Lane.COMPUTE] == pytest.approx(8 * 3.75 - apart, abs=TINY)


@pytest.mark.parametrize("stages", [1, 2])
def test_repetitions_are_skipped_where_no_activations_leave(stages: int) -> None:
    graph = toy_graph(Strategy(dp=1, pp=stages), blocks=4, units=1000)
    programs = lower(graph, placed(graph))
    events: list[Event] = []
    ranks = ranks_of(programs, graph, IDEAL, events)
    play_steady(ranks)
    run(ranks)
    micro_batches = {event.micro_batch for event in events}
    assert len(micro_batches) < 100


@settings(max_examples=examples(40))
@given(cases(free=True), st.integers(0, 12))
def test_the_marked_events_are_the_path(case: Case, more: int) -> None:
    """Played in full they spend the same seconds on the same lanes, one after the other."""
    group = case.graph.strategy.accumulation_group
    graph = replace(case.graph, micro_batches=case.graph.micro_batches + more * group)
    programs = lower(graph, case.placement)
    events, marked = critical_events(programs, graph, case.costs)
    assert events == simulate(programs, graph, case.costs).events
    path = [event for event in map(events.__getitem__, sorted(marked)) if event.seconds > 0]
    path.sort(key=lambda event: event.end)
    assert sum(event.seconds for event in path) == pytest.approx(
        step_seconds(programs, graph, case.costs), rel=1e-7
    )
    assert all(a.end == b.start for a, b in pairwise(path))
