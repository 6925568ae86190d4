"""The local search: legal neighbours, faster plans, and what was pinned stays."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from operator import mul

import pytest

from bigplan.effort import Effort
from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement, Rings
from bigplan.solve.alike import ROOMY
from bigplan.solve.candidate import REACHED, Candidate, Trial, Workload, try_out
from bigplan.solve.decisions import decisions_of
from bigplan.solve.improve import BUDGETS, GAIN, SMALL, Climb, further, improved
from bigplan.solve.moves import Moves
from bigplan.solve.pins import parse_pins
from bigplan.solve.resolve import problem_of, resolve
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training

# Four layers whose updates take as long as their forward pass, part of their state streamed.
MODEL = find_model("llama-3-8b").model_copy(update={"layers": 4})
TRAINING = Training(sequence_length=8192, global_batch=8)
NODES = find_cluster("h200-1x").with_caps(gpu=15_000 * 2**20).group


@cache
def _trial() -> Trial:
    strategy = Strategy(dp=1, accumulation_group=8)
    candidate = Candidate.of(Workload(MODEL, TRAINING, NODES), strategy)
    found = resolve(candidate, ROOMY, ())
    assert found is not None
    return found


def test_neighbours_are_legal_plans_that_their_decisions_describe() -> None:
    trial, seen = _trial(), set[object]()
    moves = Moves(trial.candidate, (), Rings.of(trial.placement), seed=0)
    for _ in range(150):
        neighbour = moves.draw(trial.placement, 2 * trial.seconds)
        if neighbour is None:
            continue
        seen.add(neighbour.key)
        placement = moves.placement(neighbour)
        assert Placement.model_validate(placement.model_dump()) == placement
        graph = trial.candidate.graph
        values = decisions_of(graph, placement)
        assert values == pytest.approx(dict(neighbour.values), abs=1e-4)
        problem = problem_of(trial.candidate, (), Rings.of(placement))
        assert neighbour.seconds == pytest.approx(problem.step_seconds(values), rel=1e-4)
        found = try_out(trial.candidate, placement)
        assert found is None or neighbour.seconds <= found.seconds * (1 + 1e-4)
    assert len(seen) > 20


def test_a_climb_finds_a_faster_plan_and_is_the_same_every_time() -> None:
    one, other = (Climb(_trial(), ()) for _ in range(2))
    for climb in (one, other):
        climb.go(BUDGETS[Effort.USUAL])
    assert one.best.expected < _trial().expected * (1 - 10 * GAIN)
    assert one.best.placement == other.best.placement
    assert one.best.candidate is _trial().candidate


def test_what_is_pinned_stays() -> None:
    _, pins = parse_pins({"streamed": 0.25, "slots": 3})
    candidate = _trial().candidate
    start = resolve(candidate, ROOMY, pins)
    assert start is not None
    best = further(start, pins, BUDGETS[Effort.USUAL])
    (stage,) = best.placement.stages
    assert all(
        kind.streamed == pytest.approx(0.25 * kind.layers, abs=1e-5)
        for kind in stage.kinds.values()
    )
    assert best.placement.slots == 3


def test_where_the_best_plan_moves_nothing_none_is_improved() -> None:
    nodes = find_cluster("h200-1x").group
    candidate = Candidate.of(Workload(MODEL, TRAINING, nodes), Strategy(dp=1))
    still = resolve(candidate, ROOMY, ())
    assert still is not None
    assert not still.moves
    assert improved([still, _trial()], (), BUDGETS[Effort.USUAL]) == []
    assert further(still, (), BUDGETS[Effort.USUAL]) is still


def test_what_is_expected_is_the_mean_over_what_the_cpu_may_reach() -> None:
    trial, parts = _trial(), [part for _, part in REACHED]
    assert sum(parts) == pytest.approx(1.0)
    each = []
    for reached, _ in REACHED:
        slower = trial.candidate.hindered(reached)
        was, now = (c.costs.rates for c in (trial.candidate, slower))
        assert now.cpu_update == pytest.approx(reached * was.cpu_update)
        assert now.state_in == pytest.approx(reached * was.state_in)
        assert now.state_out == pytest.approx(reached * was.state_out)
        assert now.d2h == was.d2h
        found = try_out(slower, trial.placement)
        assert found is not None
        each.append(found.seconds)
    assert each == sorted(each)
    assert each[0] == trial.seconds < each[-1]
    assert trial.expected == pytest.approx(sum(map(mul, parts, each)))


def test_more_effort_is_more_simulations_and_less_for_larger_programs() -> None:
    usual, high = BUDGETS[Effort.USUAL], BUDGETS[Effort.HIGH]
    small = replace(_trial(), instructions=SMALL)
    assert usual.of(small) < high.of(small) <= high.simulations
    larger = replace(_trial(), instructions=10 * usual.instructions)
    assert usual.of(larger) == 0 < high.of(replace(_trial(), instructions=usual.instructions))


def test_small_programs_are_simulated_as_long_as_larger_ones() -> None:
    usual = BUDGETS[Effort.USUAL]
    tiny, small, larger = (
        replace(_trial(), instructions=n) for n in (SMALL // 10, SMALL, 2 * SMALL)
    )
    assert usual.of(tiny) == 10 * usual.of(small) == 10 * usual.of(larger)
    assert usual.patience_with(tiny) == 10 * usual.patience_with(small) == 10 * usual.patience
