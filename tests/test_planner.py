"""The whole way from descriptions to a plan, judged by what must hold for any right answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from bigplan.errors import InfeasibleError, InputError
from bigplan.graph.graph import Recompute
from bigplan.placement import Rings, Tier
from bigplan.plan import Plan, plan_text
from bigplan.planner import Request, make_plan, programs_of, simulate_plan
from bigplan.simulate import LAUNCHING
from bigplan.solve.ilp import BOUND_GAP
from bigplan.solve.thresholds import WITHIN
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import Cluster
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.verify import verify
from tests.tiny import tiny_plan

MIB = 2**20
TRAINING = Training(sequence_length=256, global_batch=16)
Settings = Mapping[str, str | int | float]


def _machine(gpu: int | None = None, host: int | None = None, nvme: int | None = None) -> Cluster:
    """One H200, capped: MiB usable beside what the CUDA context takes; nvme=0 takes the drive.

    Its host launches in no time: layers as small as these would take as long whatever moves.
    """
    cluster = find_cluster("h200-1x")
    at_once = {"operator_overhead": 0.0, "action_overhead": 0.0}
    group = cluster.group
    group = group.model_copy(update={"gpu": group.gpu.model_copy(update=at_once)})
    context = group.gpu.context_memory
    return cluster.model_copy(update={"node_groups": (group,)}).with_caps(
        gpu=None if gpu is None else gpu * MIB + context,
        host=None if host is None else host * MIB,
        nvme=None if nvme is None else nvme * MIB,
    )


def _plan(cluster: Cluster, settings: Settings | None = None, **options: bool | str) -> Plan:
    request = Request(find_model("tiny-llama-demo"), TRAINING, cluster, settings or {}, **options)  # type: ignore[arg-type]
    return make_plan(request)


def _capped(gpu: int | None = None, host: int | None = None, nvme: int | None = None) -> Plan:
    """Of tests with first plans alone."""
    return _once(gpu, host, nvme)


@cache
def _once(*caps: int | None) -> Plan:
    return _plan(_machine(*caps))


TIGHT = (20, 87, 2000)


@cache
def _whole() -> Plan:
    """Of tests with whole searches: everything moves, and the climb has made the plan faster."""
    return _plan(_machine(*TIGHT))


CAPS = [(None, None, None), (60, None, None), (30, None, None), TIGHT, (20, 1000, 0)]


@pytest.mark.usefixtures("first_plans")
@pytest.mark.parametrize("caps", CAPS)
def test_a_plan_keeps_its_promises(caps: tuple[int | None, ...]) -> None:
    _keeps_its_promises(_capped(*caps))


def test_an_improved_plan_keeps_its_promises() -> None:
    _keeps_its_promises(_whole())


def _keeps_its_promises(plan: Plan) -> None:
    predicted = plan.predicted
    candidate, programs = programs_of(plan)
    verify(programs, candidate.graph, candidate.costs.capacity, candidate.costs.sharing)
    assert simulate_plan(plan).seconds == predicted.step_seconds
    assert predicted.lower_bound_seconds <= predicted.step_seconds * (1 + 1e-9)
    seconds = predicted.step_seconds
    assert predicted.step_seconds_low <= seconds <= predicted.step_seconds_high
    assert predicted.step_seconds_overlapped <= seconds <= predicted.step_seconds_serial
    assert predicted.simulated_gap == pytest.approx(
        predicted.step_seconds / predicted.lower_bound_seconds - 1
    )
    # Integer optima are known within HiGHS's relative gap of 1e-4.
    assert -1e-4 <= predicted.model_gap <= predicted.simulated_gap + 1e-4
    tokens = TRAINING.sequence_length * TRAINING.global_batch
    assert predicted.tokens_per_second == pytest.approx(tokens / predicted.step_seconds)
    assert 0 < predicted.mfu < 1
    path = predicted.critical_path
    assert sum(path.values()) == pytest.approx(seconds)
    assert path[predicted.bottleneck] == max(path.values())
    assert set(path) <= set(predicted.busy_seconds)
    for use in predicted.memory:
        program = programs[use.stage]
        ranks = 1 if use.scope == "gpu" else candidate.costs.sharing.ranks
        processes = use.by_purpose.get("processes", 0)
        assert use.used_bytes == program.bytes_by_tier()[use.tier] * ranks + processes
        assert (processes > 0) == (use.tier is Tier.HOST)
        assert use.used_bytes == sum(use.by_purpose.values()) <= use.capacity_bytes


@pytest.mark.usefixtures("first_plans")
def test_ample_memory_moves_nothing() -> None:
    (stage,) = _capped().placement.stages
    for rows in stage.kinds.values():
        everywhere = {Tier.GPU: rows.layers}
        assert rows.parameters == rows.gradients == rows.optimizer == everywhere
        assert rows.activations == {Recompute.NONE: everywhere}
    # The CPU computes the clip factor, from norms that the GPU computes beside the backward.
    lanes = {"gpu compute", LAUNCHING, "gpu update", "cpu", "data"}
    assert set(_capped().predicted.busy_seconds) <= lanes


@pytest.mark.usefixtures("first_plans")
def test_tight_memory_moves_something() -> None:
    (stage,) = _capped(20, 1000, 0).placement.stages
    block = stage.kinds["block"]
    assert block.optimizer.get(Tier.GPU, 0.0) < block.layers
    use = {use.tier: use for use in _capped(20, 1000, 0).predicted.memory}
    assert use[Tier.HOST].by_purpose["optimizer"] > 0
    assert use[Tier.NVME].used_bytes == use[Tier.NVME].capacity_bytes == 0


def _not_worse(better: Plan, worse: Plan) -> None:
    """More cannot hurt: the bound falls, and the plan stays within its own gap of the bound."""
    more, less = better.predicted, worse.predicted
    # Integer programs that raise the bound stop within BOUND_GAP of their optimum.
    assert more.lower_bound_seconds <= less.lower_bound_seconds * (1 + BOUND_GAP)
    assert more.step_seconds <= less.step_seconds * (1 + more.simulated_gap)


@pytest.mark.usefixtures("first_plans")
def test_more_memory_is_never_worse() -> None:
    """Plans that other tests make, too; of host memory alone tests/test_sanity.py has more."""
    ample = [_capped(gpu) for gpu in (30, 60, None)]
    for least in (_capped(*TIGHT), _capped(20, 1000, 0)):
        for worse, better in pairwise((least, *ample)):
            _not_worse(better, worse)


GROUPED: Settings = {
    "micro_batch": 2,
    "accumulation_group": 8,
}  # the best of all, if they are tight


@cache
def _grouped() -> Plan:
    """Of tests with first plans alone: everything moves, by one way to share out the batch."""
    return _plan(_machine(*TIGHT), GROUPED)


@pytest.mark.usefixtures("first_plans")
@pytest.mark.parametrize(
    "field", ["host_to_device", "device_to_host", "read", "write", "adam_rate"]
)
def test_more_bandwidth_is_never_worse(field: str) -> None:
    cluster = _machine(20, 87, 2000)
    group = cluster.group
    part = next(p for p in ("pcie", "nvme", "host") if hasattr(getattr(group, p), field))
    block = getattr(group, part)
    factor = {field: getattr(block, field) * 4}
    if part == "pcie":
        factor[f"node_{field}"] = getattr(block, f"node_{field}") * 4
    faster = group.model_copy(update={part: block.model_copy(update=factor)})
    _not_worse(_plan(cluster.model_copy(update={"node_groups": (faster,)}), GROUPED), _grouped())


@pytest.mark.parametrize("devices", [1, 2])
def test_what_fits_stays_on_the_gpu(devices: int) -> None:
    """Moving it would save less than the gap to which integer programs are solved."""
    for stage in tiny_plan(devices).placement.stages:
        assert not any(kind.moves for kind in stage.kinds.values())


# The blocks' optimizer state and activations are left to choose: few enough to try all.
ALONE = {"micro_batch": 1, "accumulation_group": 2}
FEW: Settings = {**ALONE, "streamed": 0, "optimizer.nvme": 0} | {
    f"{kind}.{tensor}": "gpu"
    for kind in ("embedding", "head")
    for tensor in ("parameters", "gradients", "optimizer")
}


def _exact(kib: int) -> Plan:
    training = Training(sequence_length=128, global_batch=4)
    model, cluster = find_model("tiny-llama-test"), _machine()
    cluster = cluster.with_caps(gpu=kib * 1024 + cluster.group.gpu.context_memory)
    settings = {**FEW, "block.parameters": "gpu", "block.gradients": "gpu"}
    return make_plan(Request(model, training, cluster, settings, exact=True))


def test_exact_plans_only_get_faster_with_memory_and_have_no_gap() -> None:
    plans = [_exact(kib) for kib in (1900, 8000)]
    seconds = [plan.predicted.step_seconds for plan in plans]
    assert seconds[0] > seconds[1]
    assert all(plan.predicted.simulated_gap == plan.predicted.model_gap == 0 for plan in plans)


def test_exact_mode_says_when_a_problem_is_too_large() -> None:
    with pytest.raises(InputError, match="it is for small problems"):
        make_plan(Request(find_model("llama-3-8b"), TRAINING, _machine(), exact=True))


SCRIPT = "from tests.test_planner import texts; print(texts(), end='')"


def texts() -> str:
    """A plan that was improved, and one of many strategies."""
    cluster = find_cluster("dgx-h100").with_caps(gpu=3 * 2**30)
    training = Training(sequence_length=256, global_batch=32)
    spread = make_plan(Request(find_model("tiny-llama-demo"), training, cluster))
    return plan_text(_whole()) + plan_text(spread)


def test_equal_inputs_give_equal_bytes() -> None:
    """Here, after other plans, and in a process of its own with another order of sets."""
    root = str(Path(__file__).resolve().parents[1])
    elsewhere = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=os.environ | {"PYTHONHASHSEED": "4711", "PYTHONPATH": root},
        cwd="/",
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert elsewhere == texts()


@pytest.mark.usefixtures("first_plans")
@pytest.mark.parametrize("caps", CAPS)
def test_pinning_every_decision_of_a_plan_gives_the_plan(caps: tuple[int | None, ...]) -> None:
    _is_its_pins(_capped(*caps), _machine(*caps))


def test_pinning_every_decision_of_an_improved_plan_gives_the_plan() -> None:
    _is_its_pins(_whole(), _machine(*TIGHT))


def _is_its_pins(plan: Plan, machine: Cluster) -> None:
    pinned = _plan(machine, _pins_of(plan))
    assert pinned.strategy == plan.strategy
    assert pinned.placement == plan.placement
    assert pinned.predicted.step_seconds == plan.predicted.step_seconds


def _pins_of(plan: Plan) -> dict[str, str | int | float]:
    """Every decision, in the words of `--set`; one stage, all activations of a policy together."""
    settings: dict[str, str | int | float] = dict(plan.strategy.model_dump())
    settings |= Rings.of(plan.placement)._asdict()
    (stage,) = plan.placement.stages
    for kind, rows in stage.kinds.items():
        for tier in Tier:
            settings[f"{kind}.parameters.{tier}"] = rows.parameters.get(tier, 0)
            settings[f"{kind}.gradients.{tier}"] = rows.gradients.get(tier, 0)
            settings[f"{kind}.optimizer.{tier}"] = rows.optimizer.get(tier, 0.0) / rows.layers
            kept = sum(tiers.get(tier, 0) for tiers in rows.activations.values())
            settings[f"{kind}.activations.{tier}"] = kept
        settings[f"{kind}.streamed"] = rows.streamed / rows.layers
        for recompute in Recompute:
            total = sum(rows.activations.get(recompute, {}).values())
            settings[f"{kind}.recompute.{recompute}"] = total
    return settings


@pytest.mark.usefixtures("first_plans")
@pytest.mark.parametrize("caps", [(5, None, 0), (20, 50, 0), (30, 1, 60)])
def test_what_is_short_is_named_and_adding_it_is_enough(caps: tuple[int | None, ...]) -> None:
    with pytest.raises(InfeasibleError) as error:
        _plan(_machine(*caps))
    short = error.value
    assert f"{short.tier} memory is" in str(short)
    assert "Smallest change that fits: " in str(short)
    assert short.remedy in str(short)
    assert short.bytes_short > 0
    # Told in whole MiB, so that the plan's rows and pages have room.
    assert short.bytes_short % MIB == 0
    tiers = dict(zip(("gpu", "host", "nvme"), caps, strict=True))
    enough = (tiers[short.tier] or 0) + short.bytes_short // MIB
    plan = _plan(_machine(**tiers | {short.tier: enough}), {"micro_batch": 1})
    assert plan.predicted.step_seconds > 0
    # And it is not told twice over: with half of it nothing fits.
    half = (tiers[short.tier] or 0) + short.bytes_short // MIB // 2
    with pytest.raises(InfeasibleError):
        _plan(_machine(**tiers | {short.tier: half}))


@pytest.mark.usefixtures("first_plans")
def test_pins_are_obeyed_or_refused() -> None:
    plan = _plan(_machine(), {"block.parameters": "host", "micro_batch": 2, "recompute": "full"})
    block = plan.placement.stages[0].kinds["block"]
    assert block.parameters == {Tier.HOST: 6}
    assert set(block.activations) == {Recompute.FULL}
    assert plan.strategy.micro_batch == 2
    with pytest.raises(InputError, match="satisfies dp=3"):
        _plan(_machine(), {"dp": 3})
    with pytest.raises(InputError, match="no such layer kind"):
        _plan(_machine(), {"attention.parameters": "host"})
    with pytest.raises(InfeasibleError, match="free a decision pinned with --set"):
        _plan(_machine(), {"parameters": "host", "optimizer": "gpu"})


@pytest.mark.usefixtures("first_plans")
def test_an_engine_limits_the_strategies() -> None:
    cluster = find_cluster("dgx-h100").with_caps(gpu=3 * 2**30)
    training = Training(sequence_length=256, global_batch=32)
    plan = make_plan(Request(find_model("tiny-llama-demo"), training, cluster, engine="native"))
    assert plan.executable["native"] is True
    assert plan.strategy.tp == 1
    assert isinstance(plan.executable["deepspeed"], str)


@pytest.mark.usefixtures("first_plans")
@pytest.mark.parametrize("length", [8192, 32768])
def test_a_model_with_a_window_is_planned_and_runs_beyond_it(length: int) -> None:
    """Mistral, whose window of 4,096 leaves 3/4 and 15/64 of these triangles."""
    windowed, whole = (
        _of_length(find_model("mistral-7b").model_copy(update={"sliding_window": window}), length)
        for window in (4096, None)
    )
    for plan in (windowed, whole):
        assert plan.executable["native"] is True
        candidate, programs = programs_of(plan)
        verify(programs, candidate.graph, candidate.costs.capacity, candidate.costs.sharing)
    part = {8192: 3 / 4, 32768: 15 / 64}[length]
    flops = [plan.predicted.mfu * plan.predicted.step_seconds for plan in (windowed, whole)]
    model = windowed.model
    matrices = 6 * (model.parameter_count - model.vocab * model.hidden)  # look-ups are none
    triangle = 6 * length * model.heads * model.head_dim * model.layers
    expected = (matrices + part * triangle) / (matrices + triangle)
    # parameter_count has norms, which compute next to nothing.
    assert flops[0] / flops[1] == pytest.approx(expected, rel=1e-4)
    if length == 32768:
        assert windowed.predicted.step_seconds < whole.predicted.step_seconds


def _of_length(model: ModelSpec, length: int) -> Plan:
    training = Training(sequence_length=length, global_batch=8)
    return make_plan(Request(model, training, find_cluster("hgx-h200"), engine="native"))


def test_alternatives_are_other_strategies_and_no_better() -> None:
    plan = _whole()
    strategies = [alternative.strategy for alternative in plan.alternatives]
    assert plan.strategy not in strategies
    assert len(set(strategies)) == len(strategies)
    for alternative in plan.alternatives:
        assert alternative.step_seconds >= plan.predicted.step_seconds
    assert plan.search.strategies > len(strategies)


@pytest.mark.usefixtures("first_plans")
def test_a_stopped_search_gives_its_best_plan_and_says_so() -> None:
    cluster = find_cluster("dgx-h100").with_caps(gpu=3 * 2**30)
    training = Training(sequence_length=256, global_batch=32)
    request = Request(find_model("tiny-llama-demo"), training, cluster)
    seen: list[tuple[float | None, float, int]] = []

    def watch(best: float | None, bound: float, left: int) -> bool:
        seen.append((best, bound, left))
        return best is None

    early, whole = make_plan(request, watch), make_plan(request)
    assert early.search.stopped
    assert not whole.search.stopped
    assert len(seen) > 1
    # The whole search may prefer a simpler plan that takes as much longer.
    assert early.predicted.step_seconds * (1 + WITHIN) >= whole.predicted.step_seconds
    assert early.predicted.lower_bound_seconds <= whole.predicted.step_seconds * (1 + 1e-9)
    assert simulate_plan(early).seconds == early.predicted.step_seconds


@pytest.mark.usefixtures("first_plans")
@pytest.mark.parametrize(("nodes", "gpus", "batch"), [(3, 1, 2), (2, 1, 1), (1, 3, 2)])
def test_a_plan_is_planned_again_for_the_nodes_that_it_leaves_idle_too(
    nodes: int, gpus: int, batch: int
) -> None:
    """Heads and layers in powers of two: only one or two GPUs can share two sequences."""
    each = {"nodes": nodes, "gpus_per_node": gpus}
    cluster = find_cluster("dgx-h100")
    group = cluster.group.model_copy(update=each)
    cluster = cluster.model_copy(update={"node_groups": (group,)})
    training = Training(sequence_length=64, global_batch=batch)
    plan = make_plan(Request(find_model("tiny-llama-demo"), training, cluster))
    assert plan.search.idle_gpus > 0, "without an idle GPU this shows nothing"
    again = Request.of_plan(plan)
    assert again.cluster == cluster
    assert make_plan(again) == plan


@pytest.mark.usefixtures("first_plans")
def test_a_plan_that_cannot_run_here_is_planned_again_as_it_was() -> None:
    training = Training(sequence_length=64, global_batch=2, dropout=0.1)
    plan = make_plan(Request(find_model("tiny-llama-demo"), training, find_cluster("h200-1x")))
    assert make_plan(Request.of_plan(plan)) == plan


def test_a_step_of_little_work_runs_on_one_gpu_of_eight() -> None:
    """Its stages would take turns, and its tensor-parallel ranks wait for launches and sums."""
    training = Training(sequence_length=64, global_batch=1)
    plan = make_plan(Request(find_model("tiny-llama-demo"), training, find_cluster("dgx-h100")))
    assert plan.strategy.ranks == 1
    assert plan.search.idle_gpus == 7


@pytest.mark.usefixtures("first_plans")
def test_a_node_without_a_network_may_leave_gpus_idle() -> None:
    cluster = find_cluster("h200-1x")
    group = cluster.group.model_copy(update={"gpus_per_node": 2})
    cluster = cluster.model_copy(update={"node_groups": (group,)})
    assert group.inter_node is None
    training = Training(sequence_length=512, global_batch=8)
    plan = make_plan(Request(find_model("tiny-llama-demo"), training, cluster))
    assert plan.strategy.ranks + plan.search.idle_gpus == 2


@pytest.mark.usefixtures("first_plans")
@pytest.mark.parametrize(("nodes", "tp", "idle"), [(1, 2, 6), (4, 8, 24)])
def test_all_splits_pinned_say_how_many_gpus_work(nodes: int, tp: int, idle: int) -> None:
    cluster = find_cluster("dgx-h100").with_nodes(nodes)
    training = Training(sequence_length=2048, global_batch=8)
    pins = {"dp": 1, "tp": tp, "pp": 1}
    plan = make_plan(Request(find_model("llama-3.2-1b"), training, cluster, pins))
    assert (plan.strategy.tp, plan.strategy.ranks) == (tp, tp)
    assert plan.search.idle_gpus == idle


def test_splits_pinned_to_a_part_of_a_node_beside_others_are_no_plan() -> None:
    cluster = find_cluster("dgx-h100").with_nodes(2)
    training = Training(sequence_length=2048, global_batch=8)
    pins = {"dp": 1, "tp": 4, "pp": 1}
    with pytest.raises(InputError, match="whole nodes"):
        make_plan(Request(find_model("llama-3.2-1b"), training, cluster, pins))


@pytest.mark.usefixtures("first_plans")
def test_moved_bytes_are_those_of_the_lane_s_busiest_stage() -> None:
    plan = _plan(_machine(), {"optimizer": "nvme"})
    candidate, (program,) = programs_of(plan)
    moved, rates = plan.predicted.moved_bytes, candidate.costs.rates
    assert moved["nvme write"] > 0
    for lane, rate in (("nvme write", rates.nvme_write), ("host to device", rates.h2d)):
        # Busy seconds are the bytes at the lane's rate, and a latency per move besides.
        assert moved[lane] / rate <= plan.predicted.busy_seconds[lane] * (1 + 1e-9)
    # Every step writes the whole optimizer state on NVMe back (stored in whole pages).
    state = sum(b.total for b in program.buffers.values() if b.name.endswith(".nvme"))
    assert moved["nvme write"] >= 0.9 * state > 0
