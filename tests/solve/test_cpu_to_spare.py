"""Plans that are made for a slower CPU, too."""

from __future__ import annotations

from functools import cache
from operator import mul

import pytest

from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement, StagePlacement, Tier
from bigplan.solve.alike import ROOMY
from bigplan.solve.candidate import Candidate, Trial, Workload, try_out
from bigplan.solve.cpu_to_spare import (
    PREMIUM,
    REACHED,
    _streaming_more,
    expected_seconds,
    with_cpu_to_spare,
)
from bigplan.solve.ilp import GAP
from bigplan.solve.pins import parse_pins
from bigplan.solve.resolve import SURCHARGES, resolve
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.toys import kind_placement

# Four layers whose updates take as long as their forward pass, part of their state streamed.
MODEL = find_model("llama-3-8b").model_copy(update={"layers": 4})
TRAINING = Training(sequence_length=8192, global_batch=8)
NODES = find_cluster("h200-1x").with_caps(gpu=16_000 * 2**20).group


@cache
def _trial() -> Trial:
    strategy = Strategy(dp=1, accumulation_group=8)
    candidate = Candidate.of(Workload(MODEL, TRAINING, NODES), strategy)
    found = resolve(candidate, [(rho, ROOMY) for rho in SURCHARGES], ())
    assert found is not None
    return found


def _streamed(trial: Trial) -> float:
    return sum(kind.streamed for kind in trial.placement.stages[0].kinds.values())


def test_plans_are_chosen_for_a_slower_cpu_too() -> None:
    trial = _trial()
    spared = with_cpu_to_spare(trial, ())
    assert 0 < _streamed(trial) != _streamed(spared) > 0
    assert spared.candidate is trial.candidate
    assert spared.seconds < trial.seconds * (1 + PREMIUM)
    assert expected_seconds(spared) < expected_seconds(trial) * (1 - GAP)
    # As valid as any: what was changed is checked once more.
    assert Placement.model_validate(spared.placement.model_dump()) == spared.placement


def test_no_other_share_of_the_last_layers_state_is_expected_to_be_faster() -> None:
    spared = with_cpu_to_spare(_trial(), ())
    (stage,) = spared.placement.stages
    last = spared.candidate.graph.layers[-1]
    tried = set()
    for share in (0.0, 0.5, 1.0):
        other_last = stage.kinds[last].model_copy(update={"streamed": share})
        kinds = {**stage.kinds, last: other_last}
        placement = spared.placement.model_copy(
            update={"stages": (stage.model_copy(update={"kinds": kinds}),)}
        )
        other = try_out(spared.candidate, placement)
        assert other is not None
        tried.add(other.seconds)
        if other.seconds < _trial().seconds * (1 + PREMIUM):
            assert expected_seconds(other) >= expected_seconds(spared)
    assert len(tried) > 1  # it matters


def test_a_solvers_noise_never_streams_less_than_nothing() -> None:
    still = kind_placement(2).model_copy(update={"optimizer": {Tier.GPU: 2 + 1e-9}})
    kinds = {"embedding": kind_placement(1), "block": still, "head": kind_placement(1)}
    placement = Placement(stages=(StagePlacement(kinds=kinds),))
    for more in (-0.1, 0.1):
        assert _streaming_more(placement, more) == placement


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
        assert slower.beside_update().costs.rates.d2h == now.state_out < was.d2h
        found = try_out(slower, trial.placement)
        assert found is not None
        each.append(found.seconds)
    assert each[0] == trial.seconds <= each[1] <= each[2]
    assert expected_seconds(trial) == pytest.approx(sum(map(mul, parts, each)))


def test_a_plan_that_the_cpu_does_not_hold_up_stays() -> None:
    nodes = find_cluster("h200-1x").group
    candidate = Candidate.of(Workload(MODEL, TRAINING, nodes), Strategy(dp=1))
    found = resolve(candidate, [(SURCHARGES[0], ROOMY)], ())
    assert found is not None
    assert not found.moves
    assert with_cpu_to_spare(found, ()) is found


def test_the_fraction_that_is_streamed_may_be_pinned() -> None:
    _, pins = parse_pins({"streamed": 0.2})
    assert with_cpu_to_spare(_trial(), pins) is _trial()
