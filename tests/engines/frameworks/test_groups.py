"""Zero groups of other tools: which have them, what they take, and when a search proposes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigplan.cost.collective import all_reduce, replica_group
from bigplan.cost.step import framework_step, hidden_by
from bigplan.engines import make_plan
from bigplan.engines.frameworks import FRAMEWORKS
from bigplan.engines.frameworks.price import PricedWay
from bigplan.engines.frameworks.search import FrameworkSearch
from bigplan.engines.frameworks.way import Way
from bigplan.errors import BigplanError
from bigplan.graph.strategy import Strategy
from bigplan.planner import Request
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import Cluster
from bigplan.spec.training import Training
from tests.engines.deepspeed.test_search import Settings

GROUPED = {"fsdp2": 3, "accelerate": 3, "torchtitan": 3, "megatron": 1}


def _nodes(number: int, gigabits: float) -> Cluster:
    """Eight H100s each, whose network moves so much."""
    cluster = find_cluster("dgx-h100").with_nodes(number)
    group = cluster.group
    assert group.inter_node is not None
    network = group.inter_node.model_copy(update={"bandwidth": gigabits * 1e9 / 8})
    slow = group.model_copy(update={"inter_node": network})
    return cluster.model_copy(update={"node_groups": (slow,)})


def _asked(engine: str, cluster: Cluster, settings: Settings, batch: int = 64) -> Request:
    training = Training(sequence_length=4096, global_batch=batch)
    return Request(find_model("llama-3-8b"), training, cluster, settings, engine=engine)


def _priced(engine: str, strategy: Strategy, batch: int = 64, *, away: bool = False) -> PricedWay:
    search = FrameworkSearch(FRAMEWORKS[engine].tool, _asked(engine, _nodes(2, 400), {}, batch))
    return search.priced(Way(strategy, on_cpu=float(away), parameters_on_host=away))


@pytest.mark.parametrize(("engine", "zero"), GROUPED.items())
def test_a_rank_has_its_part_of_a_groups_copy(engine: str, zero: int) -> None:
    """Half as many ranks share states, so each has twice as much of what ZeRO shards.

    With several micro-batches FSDP2 has its part of the gradients twice.
    """
    whole, grouped = (
        _priced(engine, Strategy(dp=16, zero=zero, zero_group=group), 16).memory[0].by_purpose
        for group in (0, 8)
    )
    sharded = {"parameters", "gradients", "optimizer"} & {*whole} if zero == 3 else {"optimizer"}
    for purpose in sharded:
        assert grouped[purpose] == pytest.approx(2 * whole[purpose], rel=1e-6)
    for purpose in {*whole} - sharded:
        assert grouped[purpose] == whole[purpose]


def test_state_of_a_group_in_host_memory() -> None:
    whole, grouped = (
        _priced("fsdp2", Strategy(dp=16, zero=3, zero_group=g), away=True) for g in (0, 8)
    )
    host = (priced.memory[1].by_purpose["optimizer"] for priced in (whole, grouped))
    before, after = host
    assert after == pytest.approx(2 * before, rel=1e-3)


def test_collectives_stay_in_the_group_but_for_a_sum_of_parts() -> None:
    strategy = Strategy(dp=16, zero=3, zero_group=8)
    grouped, whole = (
        _priced("fsdp2", one) for one in (strategy, strategy.model_copy(update={"zero_group": 0}))
    )
    block, nodes = grouped.costs.kinds["block"], grouped.run.nodes
    assert block.gather < whole.costs.kinds["block"].gather
    elements = -(-grouped.graph.kinds["block"].parameters // 8)
    assert block.sum_replicas == all_reduce(4 * elements, replica_group(strategy, nodes))


@pytest.mark.parametrize(("engine", "often"), [("fsdp2", True), ("megatron", False)])
def test_torch_sums_over_groups_every_micro_batch_and_megatron_fsdp_once(
    engine: str, often: bool
) -> None:
    strategy = Strategy(dp=16, zero=3, zero_group=8)
    few, many = (_priced(engine, strategy, batch) for batch in (64, 128))
    assert many.graph.micro_batches == 2 * few.graph.micro_batches
    alone = [_apart(one) for one in (few, many)]
    shared = [sum(one.parts.values()) for one in (few, many)]
    summing = [with_sums - without for with_sums, without in zip(shared, alone, strict=True)]
    assert min(summing) > 0
    assert summing[1] == pytest.approx((2 if often else 1) * summing[0], rel=1e-6)


def _apart(priced: PricedWay) -> float:
    """Seconds of the step without sums over groups."""
    kinds = {name: replace(k, sum_replicas=0.0) for name, k in priced.costs.kinds.items()}
    costs, run = replace(priced.costs, kinds=kinds), priced.run
    return sum(
        framework_step(priced.graph, costs, run.nodes, run.framework, run.execution).values()
    )


def test_a_distributed_optimizer_sums_within_the_last_backward() -> None:
    """One block of 8B: its scatter and its sum hide as far as the backward reaches."""
    priced = _priced("megatron", Strategy(dp=16, zero=1, zero_group=8))
    kinds, framework = priced.costs.kinds, priced.run.framework
    counts = {"embedding": 1, "block": 32, "head": 1}
    each = [(n, kinds[name]) for name, n in counts.items()]
    reduced = sum(n * (kind.reduce + kind.sum_replicas) for n, kind in each)
    backward = sum(n * kind.backward for n, kind in each)
    gathered = framework.reduce_exposed * sum(n * kind.gather for n, kind in each)
    after = hidden_by(reduced, backward, framework.reduce_exposed) + gathered
    assert priced.parts["reduce"] == pytest.approx(after)


@pytest.mark.parametrize(
    ("engine", "settings", "told"),
    [
        ("nemo", {"zero_group": 8, "dp": 16, "zero": 1}, "plan with --engine megatron"),
        ("torchtitan", {"zero_group": 8, "zero": 1}, "with zero 2 or 3"),
        ("torchtitan", {"zero": 0, "tp": 2, "pp": 1}, "beside no other split"),
        ("fsdp2", {"zero_group": 8, "zero": 0}, "use zero 1, 2 or 3"),
        ("megatron", {"zero_group": 3, "dp": 16}, "does not divide the 16 ranks"),
        ("fsdp2", {"zero_group": 3}, "no way in which fsdp2 runs"),
    ],
)
def test_what_a_tool_does_not_have_is_refused(engine: str, settings: Settings, told: str) -> None:
    with pytest.raises(BigplanError, match=told):
        make_plan(_asked(engine, _nodes(2, 400), settings))


@pytest.mark.parametrize("ep", [1, 8])
def test_experts_are_not_planned_with_groups(ep: int) -> None:
    training = Training(sequence_length=4096, global_batch=64)
    cluster, wanted = _nodes(2, 400), {"zero_group": 8, "dp": 16, "zero": 1, "ep": ep}
    request = Request(find_model("mixtral-8x7b"), training, cluster, wanted, engine="megatron")
    with pytest.raises(BigplanError, match="does not price how megatron shards experts"):
        make_plan(request)


@pytest.mark.parametrize(("gigabits", "group"), [(25, 8), (3200, 0)])
def test_a_search_proposes_groups_where_the_network_is_slow(gigabits: float, group: int) -> None:
    """With a fixed micro-batch, several of which gather over all ranks twice each."""
    fixed: Settings = {"zero": 3, "micro_batch": 1}
    ways = [
        make_plan(_asked("fsdp2", _nodes(2, gigabits), {**fixed, **more}))
        for more in ({}, {"zero_group": 0}, {"zero_group": 8})
    ]
    found, whole, grouped = ways
    assert found.strategy.zero_group == group
    steps = [plan.predicted.step_seconds for plan in (whole, grouped)]
    assert found.predicted.step_seconds <= 1.01 * min(steps)
    if group:
        assert found.predicted.step_seconds < 0.95 * whole.predicted.step_seconds
