"""What becomes of a strategy's plan once it is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement
from bigplan.solve.candidate import (
    SPARED,
    SURCHARGES,
    Candidate,
    Trial,
    Workload,
    resolve,
    try_out,
    with_cpu_to_spare,
)
from bigplan.solve.ilp import GAP
from bigplan.solve.pins import parse_pins
from bigplan.solve.stage import ROOMY
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training

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


def _hindered(candidate: Candidate, placement: Placement) -> float:
    """Seconds with a CPU that is slower by SPARED."""
    rates = candidate.costs.rates
    slower = replace(rates, cpu_update=(1 - SPARED) * rates.cpu_update)
    found = try_out(replace(candidate, costs=replace(candidate.costs, rates=slower)), placement)
    assert found is not None
    return found.seconds


def test_the_streamed_part_is_chosen_for_a_slower_cpu_too() -> None:
    trial = _trial()
    spared = with_cpu_to_spare(trial, ())
    before, after = (
        sum(kind.streamed for kind in found.placement.stages[0].kinds.values())
        for found in (trial, spared)
    )
    assert before > 0 < after != before
    assert spared.seconds <= trial.seconds * (1 + GAP)
    both = [t.seconds + _hindered(t.candidate, t.placement) for t in (trial, spared)]
    assert both[1] < both[0] * (1 - GAP)
    # As valid as any: what was changed is checked once more.
    assert Placement.model_validate(spared.placement.model_dump()) == spared.placement


def test_the_fraction_that_is_streamed_may_be_pinned() -> None:
    _, pins = parse_pins({"streamed": 0.2})
    assert with_cpu_to_spare(_trial(), pins) is _trial()
