"""Of plans about as fast the simplest is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigplan.effort import Effort
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.solve.candidate import Candidate, Trial, Workload, try_out
from bigplan.solve.improve import BUDGETS
from bigplan.solve.pins import Pin, parse_pins
from bigplan.solve.search import Scope, search
from bigplan.solve.simplicity import complexity, mechanisms, simplest
from bigplan.solve.thresholds import WITHIN
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from bigplan.units import PerRank
from tests.toys import COSTS, RATES, kind_placement, placed, toy_graph

FAST = replace(
    RATES,
    h2d=PerRank(1e5),
    d2h=PerRank(1e5),
    nvme_read=PerRank(1e5),
    nvme_write=PerRank(1e5),
    host_memory=PerRank(1e6),
    device_memory=PerRank(1e6),
    cpu_update=PerRank(1e5),
    state_in=PerRank(1e5),
    state_out=PerRank(1e5),
)
BLOCKS = 4
ELEMENTS, STEP = 6 * 36, 36.0  # of the toy model: parameters, and seconds of compute


def _candidate(gain: float) -> Candidate:
    """Its GPU's updates take this part of a step; on the CPU they take next to nothing."""
    rates = replace(FAST, gpu_update=PerRank(ELEMENTS / (gain * STEP)))
    return Candidate(Strategy(dp=1), toy_graph(), replace(COSTS, rates=rates))


def _trial(candidate: Candidate, home: Tier) -> Trial:
    end, block = (kind_placement(layers, optimizer=home) for layers in (1, BLOCKS))
    trial = try_out(candidate, placed(candidate.graph, embedding=end, block=block, head=end))
    assert trial is not None
    return trial


def _simplest(trials: list[Trial], pins: tuple[Pin, ...] = ()) -> Trial:
    return simplest(trials, pins, BUDGETS[Effort.USUAL])[0]


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize(("gain", "moves"), [(0.005, False), (0.02, True)])
def test_state_moves_only_for_more_than_a_hundredth_of_a_step(
    gain: float, moves: bool, home: Tier
) -> None:
    candidate = _candidate(gain)
    away, still = (_trial(candidate, tier) for tier in (home, Tier.GPU))
    assert still.seconds / away.seconds - 1 == pytest.approx(gain, rel=0.1)
    chosen = _simplest([away])
    assert chosen.moves is moves
    assert chosen.seconds <= away.expected * (1 + WITHIN)


def test_no_drive_is_written_where_host_memory_will_do() -> None:
    away = _trial(_candidate(0.02), Tier.NVME)
    assert mechanisms(away.placement) == {"optimizer", "drive"}
    assert mechanisms(_simplest([away]).placement) <= {"optimizer", "streamed"}


def test_what_the_user_decided_stays() -> None:
    away = _trial(_candidate(0.005), Tier.HOST)
    _, pins = parse_pins({"optimizer": "host"})
    assert _simplest([away], pins).placement.stages[0].kinds["block"].optimizer == {Tier.HOST: 4.0}


def test_a_plan_of_another_strategy_that_moves_nothing_is_simpler() -> None:
    candidate = _candidate(0.02)
    away = _trial(candidate, Tier.HOST)
    quicker = replace(_candidate(0.005), strategy=Strategy(dp=1, micro_batch=2))
    still = _trial(quicker, Tier.GPU)
    assert away.seconds < still.seconds < away.seconds * (1 + WITHIN)
    assert _simplest([away, still]) is still
    slower = replace(still, expected=2 * still.seconds)
    assert _simplest([away, slower]).moves


def test_simpler_is_what_moves_nothing_then_what_does_fewer_things_then_what_spares_drives() -> (
    None
):
    candidate = _candidate(0.02)
    still, host, drive = (_trial(candidate, tier) for tier in (Tier.GPU, Tier.HOST, Tier.NVME))
    block = kind_placement(BLOCKS, activations=(Recompute.FULL, Tier.GPU))
    rerun = try_out(candidate, placed(candidate.graph, block=block))
    assert rerun is not None
    assert mechanisms(rerun.placement) == {"recompute"}
    ranked = sorted([drive, rerun, host, still], key=complexity)
    assert ranked == [still, rerun, host, drive]


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "length"),
    [("gpt2-xl", "h200-1x", 32, 1024), ("llama-3-8b", "hgx-h200", 4096, 4096)],
)
def test_state_stays_on_gpus_that_have_room_for_it(
    model: str, cluster: str, batch: int, length: int
) -> None:
    """Moved, a step would be 0.1 to 1.3% shorter, if the host's cores reached all that they can."""
    training = Training(sequence_length=length, global_batch=batch)
    workload = Workload(find_model(model), training, find_cluster(cluster).group)
    assert not search(workload, Scope()).best.moves
