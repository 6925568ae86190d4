"""The search: every strategy in scope is in it, it can be stopped, and its plan can be pinned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import inf

import pytest

from bigplan.errors import InputError
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import StrategyFamily
from bigplan.lower import lower_steady
from bigplan.placement import Rings, Tier
from bigplan.program import Program
from bigplan.solve import candidate as solve_candidate
from bigplan.solve.candidate import Candidate, Workload, try_out
from bigplan.solve.pins import parse_pins
from bigplan.solve.search import Choice, Found, Scope, _Entry, _State, search, unwatched
from bigplan.solve.stage import stage_classes
from bigplan.solve.thresholds import WITHIN
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.link import find_network
from bigplan.spec.training import Training

MIB = 2**20


@cache
def _workload(gpu: int = 100, layers: int = 8) -> Workload:
    """A small model on a node of eight GPUs, each capped to so many MiB."""
    cluster = find_cluster("dgx-h100")
    context = cluster.group.gpu.context_memory
    capped = cluster.with_caps(gpu=gpu * MIB + context)
    alone = capped.group.gpu.model_copy(update={"communicator_memory": 0})
    model = find_model("tiny-llama-demo").model_copy(update={"layers": layers})
    nodes = capped.group.model_copy(update={"gpu": alone})
    return Workload(model, Training(sequence_length=256, global_batch=64), nodes)


ONE_BY_ONE = Scope({"micro_batch": 1})  # a third of all strategies


def _found(settings: Mapping[str, str | int | float], gpu: int = 100) -> Found:
    fixed, pins = parse_pins(settings)
    return search(_workload(gpu), Scope(fixed, pins, idling=False))


def test_pricing_in_common_gives_the_prices_of_each() -> None:
    workload = _workload()
    for candidate in Choice.of(workload, Scope()).candidates()[::7]:
        alone = Candidate.of(workload, candidate.strategy)
        assert candidate.graph == alone.graph
        assert candidate.costs == alone.costs


def test_the_bound_that_is_told_is_the_least_of_what_is_left() -> None:
    told = list[tuple[float, float]]()

    def watch(best: float | None, bound: float, left: int) -> bool:
        told.append((bound, min(entry.bound for entry in state._entries)))
        return True

    state = _State(Choice.of(_workload(), ONE_BY_ONE), watch)
    assert state.explore()
    assert state.certify()
    assert all(bound == least for bound, least in told)
    bounds = [bound for bound, _ in told]
    assert bounds == sorted(bounds)
    assert len(set(bounds)) > 1


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen2.5-7b"])
def test_the_fastest_strategy_is_found(model: str) -> None:
    """On an RTX 4090 it was once passed over, for an estimate 0.2% above a worse plan."""
    workload = Workload(
        find_model(model),
        Training(sequence_length=8192, global_batch=512),
        find_cluster("rtx-4090-workstation").group,
    )
    state = _State(Choice.of(workload, Scope()), unwatched)
    assert state.explore()
    fastest = min(state.trials, key=lambda trial: trial.expected).candidate.strategy
    assert (fastest.micro_batch, fastest.accumulation_group) == (1, 1)


def test_a_placement_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is asked for, unless it was too slow to be played to its end."""
    best = _found({}).best
    candidate, placement = Candidate.of(_workload(), best.candidate.strategy), best.placement
    lowered = list[int]()

    def counting(*given: object) -> tuple[Program, ...] | None:
        lowered.append(1)
        return lower_steady(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(solve_candidate, "lower_steady", counting)
    assert try_out(candidate, placement, below=1e-9) is None
    once = len(lowered)
    trial = try_out(candidate, placement)
    assert trial is not None
    assert len(lowered) == 2 * once
    assert try_out(candidate, placement) is trial
    assert try_out(candidate, placement, below=trial.seconds) is None
    assert try_out(candidate, placement, below=2 * trial.seconds) is trial
    assert len(lowered) == 2 * once


def test_families_cover_the_space() -> None:
    workload = _workload()
    wide = replace(workload, model=workload.model.model_copy(update={"vocab": 50_000}))
    choice = Choice.of(wide, Scope())
    every = [candidate.strategy for candidate in choice.candidates()]
    assert len(set(every)) == len(every)
    families = {StrategyFamily(s.dp, s.tp, s.pp, s.micro_batch) for s in every}
    assert families == set(choice.families())
    assert {s.vpp for s in every} == {1, 2, 4}
    assert any(s.first_blocks or s.last_blocks for s in every)


Told = list[tuple[float | None, float, int]]


@cache
def _watched() -> tuple[Found, Told]:
    told: Told = []

    def watch(best: float | None, bound: float, left: int) -> bool:
        told.append((best, bound, left))
        return True

    return search(_workload(), ONE_BY_ONE, watch), told


def test_a_watched_search_is_told_where_it_stands() -> None:
    found, told = _watched()
    assert not found.stopped
    best = [seconds or inf for seconds, _, _ in told]
    assert best == sorted(best, reverse=True)
    assert all(bound <= found.best.seconds for _, bound, _ in told)
    assert told[0][0] is None
    assert told[0][2] > 0


@pytest.mark.parametrize("how", ["watch", "interrupt"])
def test_a_stopped_search_answers_with_its_best(how: str) -> None:
    def watch(best: float | None, bound: float, left: int) -> bool:
        if best is None:
            return True
        if how == "interrupt":
            raise KeyboardInterrupt
        return False

    found, (whole, _) = search(_workload(), ONE_BY_ONE, watch), _watched()
    assert found.stopped
    # A search that ends takes the simplest plan of those about as fast.
    assert found.bound <= whole.best.seconds <= found.best.seconds * (1 + WITHIN)


def test_a_search_stopped_at_once_has_no_answer() -> None:
    with pytest.raises(InputError, match="stopped before any plan was found"):
        search(_workload(), Scope(), lambda best, bound, left: False)


def _every_decision(found: Found) -> dict[str, str | int | float]:
    """All decisions of a plan, in the words of `--set`."""
    best = found.best
    settings: dict[str, str | int | float] = dict(best.candidate.strategy.model_dump())
    settings |= {name: int(value) for name, value in Rings.of(best.placement)._asdict().items()}
    for stage in stage_classes(best.candidate.graph):
        for kind, rows in best.placement.stages[stage.stages[0]].kinds.items():
            where = f"{stage.name}.{kind}"
            settings[f"{where}.streamed"] = rows.streamed / rows.layers
            for tier in Tier:
                settings[f"{where}.parameters.{tier}"] = rows.parameters.get(tier, 0)
                settings[f"{where}.gradients.{tier}"] = rows.gradients.get(tier, 0)
                settings[f"{where}.optimizer.{tier}"] = rows.optimizer.get(tier, 0) / rows.layers
                for policy in Recompute:
                    kept = rows.activations.get(policy, {}).get(tier, 0)
                    settings[f"{where}.activations.{policy}.{tier}"] = kept
    return settings


PINNED: list[dict[str, str | int | float]] = [
    {"tp": 1, "pp": 4, "vpp": 2, "recompute.selective": 1},
    {"pp": 4, "vpp": 1, "dp": 2, "first_blocks": 1, "last_blocks": 2, "zero": 1},
    {"pp": 1, "zero": 3, "slots": 2, "sums": 1, "shared_ends": 1, "activations": "host"},
]


@pytest.mark.parametrize("settings", PINNED, ids=["virtual", "uneven", "rings"])
def test_pinning_every_decision_gives_the_same_plan(
    settings: dict[str, str | int | float],
) -> None:
    found = _found(settings)
    again = _found(_every_decision(found))
    assert again.best.candidate.strategy == found.best.candidate.strategy
    assert again.best.placement == found.best.placement
    assert again.best.seconds == found.best.seconds
    for key in ("pp", "vpp", "first_blocks", "last_blocks"):
        assert getattr(found.best.candidate.strategy, key) == settings.get(
            key, getattr(found.best.candidate.strategy, key)
        )


def test_fewer_rings_are_taken_where_more_do_not_fit() -> None:
    away: dict[str, str | int | float] = {
        "pp": 1,
        "tp": 1,
        "micro_batch": 1,
        "accumulation_group": 8,
        "zero": 0,
        "parameters": "host",
        "gradients": "host",
        "optimizer": "host",
        "streamed": 0.0,
        "recompute": "full",
        "block.activations": "host",
    }
    rings = {name: int(value) for name, value in Rings()._asdict().items()}
    roomy = _found(away | rings, gpu=1000)
    used = max(p.bytes_by_tier()[Tier.GPU] for p in roomy.best.programs)
    short = int(0.97 * used / 0.97 / MIB) - 1  # a little less than that plan needs
    tight = _found(away, gpu=short)
    assert Rings.of(tight.best.placement) != Rings()
    assert max(p.bytes_by_tier()[Tier.GPU] for p in tight.best.programs) <= short * MIB


@pytest.mark.usefixtures("first_plans")
def test_a_network_that_estimates_make_light_of_does_not_end_the_search() -> None:
    """Plans with one or two stages come first, and are 40% above their estimates."""
    network = find_network("ethernet-50g")
    group = find_cluster("rtx-4090-workstation").group
    nodes = group.model_copy(update={"nodes": 8, "inter_node": network})
    training = Training(sequence_length=8192, global_batch=16)
    workload = Workload(find_model("llama-3-8b"), training, nodes)
    found, pinned = (search(workload, Scope(fixed)).best.seconds for fixed in ({}, {"pp": 4}))
    assert found <= 1.005 * pinned


def test_a_strategy_with_a_late_estimate_and_the_least_bound_is_simulated() -> None:
    """An estimate makes much of moves that compute hides; a bound does not."""
    state = _State(Choice.of(_workload(), Scope({"tp": 1, "pp": 1}, idling=False)), unwatched)
    priced = state.choice.pricing.candidate
    late, hopeless = priced(Strategy(dp=8, zero=1)), priced(Strategy(dp=8, zero=2))
    state._resolve(priced(Strategy(dp=8, zero=1, micro_batch=2)), 1.0)
    best = state.best
    state._queue.clear()
    state._entries += [
        _Entry(state.choice, late, bound=0.5 * best, estimate=9 * best),
        _Entry(state.choice, hopeless, bound=best, estimate=9 * best),
    ]
    assert state.explore()
    assert [trial.candidate for trial in state.trials[1:]] == [late]


def test_strategies_alike_are_expected_as_late_as_the_one_simulated() -> None:
    """What ZeRO shards does not change how far a step is above its estimate; a batch may."""
    state = _State(Choice.of(_workload(), Scope({"tp": 1, "pp": 1}, idling=False)), unwatched)
    priced = state.choice.pricing.candidate
    first = priced(Strategy(dp=8, zero=1))
    state._resolve(first, 1.0)
    seconds = state.trials[0].expected
    assert state._expected(first, 3.0) == 3.0 * seconds
    assert state._expected(priced(Strategy(dp=8, zero=2)), 3.0) == 3.0 * seconds
    assert state._expected(priced(Strategy(dp=8, zero=1, micro_batch=2)), 3.0) == 3.0
    state._resolve(priced(Strategy(dp=8, zero=2)), 4.0)
    less = state.trials[1].expected / 4.0
    assert less < seconds
    assert state._expected(first, 3.0) == 3.0 * less


@cache
def _gpt2_xl(micro_batch: int, nvme: int | None) -> Found:
    nodes = find_cluster("h200-1x").with_caps(nvme=nvme).group
    workload = Workload(
        find_model("gpt2-xl"), Training(sequence_length=1024, global_batch=32), nodes
    )
    return search(workload, Scope({"micro_batch": micro_batch}))


@pytest.mark.parametrize("micro_batch", [4, 32])
def test_taking_away_drives_that_a_plan_leaves_alone_changes_nothing(micro_batch: int) -> None:
    """The time of a drive that is not there once made programs infeasible."""
    ample, without = (_gpt2_xl(micro_batch, nvme) for nvme in (None, 0))
    assert not any(p.bytes_by_tier()[Tier.NVME] for p in ample.best.programs)
    assert without.best.seconds == pytest.approx(ample.best.seconds, rel=0.01)


def test_nodes_by_which_nothing_divides_are_left_idle() -> None:
    """28 GPUs share out neither 24 sequences nor four blocks evenly: 24 do."""
    model = find_model("llama-2-13b").model_copy(update={"layers": 4})
    training = Training(sequence_length=512, global_batch=24, precision="fp16")
    nodes = find_cluster("v100-4x").with_nodes(7).group
    workload = Workload(model, training, nodes)
    pinned = {"micro_batch": 1, "zero": 1, "tp": 1, "pp": 1}
    found = search(workload, Scope(pinned))
    assert found.best.candidate.strategy.ranks == 24
    six = search(workload.on(24), Scope(pinned, idling=False))
    assert found.best.expected <= six.best.expected * (1 + WITHIN)
    for scope in (Scope(pinned, idling=False), Scope({"dp": 7})):
        with pytest.raises(InputError, match="no way to split"):
            search(workload, scope)
