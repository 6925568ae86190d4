"""Zero groups (hybrid sharding): strategies, program, prices, bounds and what a search makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.capabilities.splits import zero_group_refusal
from bigplan.cost.collective import Group, all_gather, all_reduce, data_group
from bigplan.cost.price import price
from bigplan.engines.deepspeed.refusals import refusal
from bigplan.errors import BigplanError, InputError
from bigplan.graph.build import build_graph
from bigplan.graph.strategy import WIDEST_CUT, Strategy
from bigplan.graph.strategy_space import Space
from bigplan.graph.told import strategy_text
from bigplan.lower import lower
from bigplan.placement import Tier
from bigplan.program import Lane, Op, expand
from bigplan.simulate import simulate
from bigplan.solve.bounds import saved_by_groups
from bigplan.solve.candidate import Workload
from bigplan.solve.legality import require_legal_strategy
from bigplan.solve.search import Scope, search
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.experiment import make_experiment
from bigplan.spec.training import Training
from tests.examples import examples
from tests.toys import kind_placement, placed, placements, prices, toy_graph

NODES = find_cluster("dgx-h100").with_nodes(4).group
MODEL = find_model("llama-2-13b")
MIXTURE = find_model("mixtral-8x7b")
TRAINING = Training(sequence_length=4096, global_batch=128, gradient_precision="bf16")
ROUNDING = 1 + 1e-9


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_rank_sums_its_part_over_groups_once_a_step(zero: int) -> None:
    graph = toy_graph(Strategy(dp=4, zero=zero, zero_group=2), blocks=4, units=3)
    (program,) = lower(graph, placed(graph))
    sums = [action for action in expand(program.step) if action.op is Op.SUM_REPLICAS]
    assert sorted(action.layer for action in sums) == list(program.layers)
    for action in sums:
        owned = graph.kinds[graph.layers[action.layer]].owned(2)
        assert action.amount == owned * graph.sizes.gradient
        assert action.lane is Lane.COMM  # that of the group's own collectives: one order for all


def test_gradients_that_leave_the_gpu_are_summed_before() -> None:
    graph = toy_graph(Strategy(dp=4, zero=2, zero_group=2), blocks=4, units=3)
    away = kind_placement(4, gradients=Tier.HOST, optimizer=Tier.HOST)
    (program,) = lower(graph, placed(graph, block=away))
    block = [a.op for a in expand(program.step) if a.layer == 2]
    ways = [op for op in block if op in (Op.REDUCE, Op.SUM_REPLICAS, Op.GRAD_OUT)]
    assert ways == 3 * [Op.REDUCE, Op.SUM_REPLICAS, Op.GRAD_OUT]


def test_all_ranks_in_one_group_have_nothing_more_to_sum() -> None:
    graph = toy_graph(Strategy(dp=4, zero=3), blocks=4)
    (program,) = lower(graph, placed(graph))
    assert all(action.op is not Op.SUM_REPLICAS for action in expand(program.step))


@pytest.mark.parametrize(
    ("tp", "group", "copies", "per_node", "share"),
    [(1, 8, 4, 1, 1 / 8), (1, 16, 2, 1, 1 / 8), (1, 4, 8, 2, 1 / 4), (2, 4, 4, 1, 1 / 8)],
)
def test_prices_follow_from_where_members_are(
    tp: int, group: int, copies: int, per_node: int, share: float
) -> None:
    """Rings of a node's ranks share its network; those within a node have its links."""
    strategy = Strategy(dp=32 // tp, tp=tp, zero=3, zero_group=group)
    graph = build_graph(MODEL, TRAINING, strategy)
    block, found = graph.kinds["block"], price(graph, TRAINING, NODES).kinds["block"]
    replicas = Group(copies, per_node, NODES.intra_node, NODES.inter_node, share)
    assert found.sum_replicas == all_reduce(2 * block.owned(group), replicas)
    inside = replace(data_group(strategy, NODES), size=group)
    assert found.gather == all_gather(2 * block.parameters, inside)
    if group * tp <= 8:
        assert (
            found.gather
            < price(
                replace(graph, strategy=Strategy(dp=32 // tp, tp=tp, zero=3)), TRAINING, _slow(100)
            )
            .kinds["block"]
            .gather
        )


@pytest.mark.parametrize(("ep", "sharers"), [(8, 1), (4, 2)])
def test_experts_are_priced_among_those_of_a_group_that_have_the_same(
    ep: int, sharers: int
) -> None:
    """In elements: of rank's 1 / ep of the experts, its group's `sharers` have a part each."""
    strategy = Strategy(dp=32, ep=ep, zero=3, zero_group=8)
    graph = build_graph(MIXTURE, TRAINING, strategy)
    block, found = graph.kinds["block"], price(graph, TRAINING, NODES).kinds["block"]
    experts = MIXTURE.experts // ep * 3 * MIXTURE.hidden * MIXTURE.ffn
    rest = block.parameters - experts
    inside = Group(8, 8, NODES.intra_node, NODES.inter_node, 1.0)
    alike = Group(sharers, sharers, NODES.intra_node, NODES.inter_node, sharers / 8)
    assert found.gather == all_gather(2 * rest, inside) + all_gather(2 * experts, alike)
    copies = Group(4, 1, NODES.intra_node, NODES.inter_node, 1 / 8)
    owned = block.owned(8) - experts // sharers
    assert owned - rest / 8 == pytest.approx(0, abs=WIDEST_CUT)
    parts = (owned, experts // sharers)
    assert found.sum_replicas == sum(all_reduce(2 * part, copies) for part in parts)


def _slow(gigabits: float) -> NodeGroup:
    """The nodes on a network of so many Gb/s a node."""
    network = NODES.inter_node
    assert network is not None
    slower = network.model_copy(update={"bandwidth": gigabits * 1e9 / 8})
    return NODES.model_copy(update={"inter_node": slower})


@st.composite
def hybrids(draw: st.DrawFn) -> Strategy:
    """Zero groups of two with every stage of ZeRO."""
    pp, group = draw(st.sampled_from(((1, 1), (1, 2), (2, 1), (2, 2))))
    zero, ep = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2)))
    return Strategy(dp=4, ep=ep, pp=pp, zero=zero, zero_group=2, accumulation_group=group)


@settings(max_examples=examples(100))
@given(hybrids(), st.data())
def test_groups_save_no_more_than_their_bound(strategy: Strategy, data: st.DataObject) -> None:
    graph = toy_graph(strategy, blocks=5, units=data.draw(st.integers(1, 3)))
    placement = data.draw(placements(graph))
    hybrid = data.draw(prices())
    longer = {
        name: replace(
            kind,
            reduce=kind.reduce + data.draw(st.sampled_from((0.0, 0.5, 3.0))),
            gather=kind.gather + data.draw(st.sampled_from((0.0, 0.2, 2.0))),
        )
        for name, kind in hybrid.kinds.items()
    }
    costs = replace(hybrid, kinds=longer)
    with_all = replace(graph, strategy=strategy.model_copy(update={"zero_group": 0}))
    before = simulate(lower(with_all, placement), with_all, costs).seconds
    after = simulate(lower(graph, placement), graph, hybrid).seconds
    assert before - saved_by_groups(with_all, costs, hybrid) <= after * ROUNDING


def test_groups_are_of_a_node_or_a_few() -> None:
    space = Space(MODEL, TRAINING, 64, 8, hybrid=True)
    assert all(not strategy.zero_group for strategy in space.strategies())
    every = Strategy(dp=64, zero=3)
    assert [one.zero_group for one in space.hybrids(every)] == [8, 16, 32]
    assert [one.zero_group for one in space.hybrids(Strategy(dp=16, tp=4, zero=3))] == [2, 4, 8]
    assert not list(space.hybrids(Strategy(dp=64)))
    assert not list(Space(MODEL, TRAINING, 64, 8).hybrids(every))
    pinned = Space(MODEL, TRAINING, 64, 8, {"zero_group": 4}, hybrid=True)
    assert {(s.zero_group or s.shards, s.zero > 0) for s in pinned.strategies()} == {(4, True)}


def test_groups_have_all_experts() -> None:
    space = Space(MIXTURE, TRAINING, 64, 8, spreads=True, hybrid=True)
    wide = Strategy(dp=64, ep=16, zero=3)
    assert [one.zero_group for one in space.hybrids(wide)] == [16, 32]
    fixed = {"zero_group": 16, "ep": 8}
    found = Space(MIXTURE, TRAINING, 64, 8, fixed, spreads=True, hybrid=True)
    assert {(one.ep, one.zero_group or one.shards) for one in found.strategies()} == {(8, 16)}


def test_experts_divide_by_the_ranks_of_a_group_where_they_do_not_by_all() -> None:
    """Of Mixtral's 2^27 * 21 elements of a block five ranks with the same have no equal parts."""
    nodes = find_cluster("dgx-h100").with_nodes(5).group
    workload = Workload(MIXTURE, TRAINING.model_copy(update={"global_batch": 40}), nodes)
    strategy = Strategy(dp=40, ep=8, zero=3)
    with pytest.raises(InputError, match=r"strategy\.ep: 8 is no way"):
        require_legal_strategy(workload, strategy)
    require_legal_strategy(workload, strategy.model_copy(update={"zero_group": 8}))


def test_a_search_divides_experts_by_groups_where_all_ranks_have_no_equal_parts() -> None:
    training = TRAINING.model_copy(update={"global_batch": 40})
    space = Space(MIXTURE, training, 40, 8, {"pp": 1, "tp": 1}, spreads=True, hybrid=True)
    found = list(space.strategies())
    assert {(one.zero > 0, one.zero_group) for one in found if one.ep > 1} == {(True, 8)}
    assert {one.zero_group for one in found if one.ep == 1} == {0}
    asked = [replace(space, fixed={"pp": 1, "ep": 8, "zero_group": ranks}) for ranks in (0, 8)]
    assert [any(one.strategies()) for one in asked] == [False, True]
    alone = replace(space, hybrid=False)
    assert {one.ep for one in alone.strategies()} == {1}
    workload = Workload(MIXTURE, training, find_cluster("dgx-h100").with_nodes(5).group)
    best = search(workload, Scope({"dp": 40, "ep": 8, "tp": 1, "pp": 1})).best
    assert best.candidate.strategy.zero_group == 8


def test_such_groups_of_several_sizes_have_bounds_of_their_own() -> None:
    """On ten nodes groups of 8 and 16 share out Mixtral's experts, which all 80 ranks cannot."""
    training = TRAINING.model_copy(update={"global_batch": 80})
    nodes = find_cluster("dgx-h100").with_nodes(10).group
    assert nodes.inter_node is not None
    network = nodes.inter_node.model_copy(update={"bandwidth": 400e9 / 8})
    workload = Workload(MIXTURE, training, nodes.model_copy(update={"inter_node": network}))
    found = search(workload, Scope({"dp": 80}))
    whole = search(workload, Scope({"dp": 80, "ep": 1})).best.expected
    assert found.best.expected < 0.9 * whole
    fixed = {"dp": 80, "ep": 8}
    ways = [search(workload, Scope({**fixed, "zero_group": n})).best.expected for n in (8, 16)]
    assert found.bound * (1 - 1e-9) <= min(ways)
    assert found.best.expected <= 1.01 * min(ways)


def test_a_search_spreads_experts_within_groups_where_that_is_faster() -> None:
    workload = Workload(MIXTURE, TRAINING, _slow(400))
    fixed = {"dp": 32, "tp": 1, "pp": 1, "ep": 8}
    found = search(workload, Scope(fixed)).best
    assert found.candidate.strategy.zero_group == 16
    assert found.expected < 0.99 * search(workload, Scope({**fixed, "zero_group": 0})).best.expected


@pytest.mark.parametrize(("gigabits", "group"), [(100, 8), (3200, 0)])
def test_a_search_shards_within_nodes_where_their_network_is_slow(
    gigabits: float, group: int
) -> None:
    workload = Workload(MODEL, TRAINING, _slow(gigabits))
    fixed = {"tp": 1, "pp": 1, "dp": 32, "zero": 3}
    found = search(workload, Scope(fixed)).best
    assert found.candidate.strategy.zero_group == group
    ways = [search(workload, Scope({**fixed, "zero_group": n})).best for n in (0, 8)]
    assert found.expected <= 1.01 * min(way.expected for way in ways)
    if group:
        assert found.expected < 0.9 * ways[0].expected


@pytest.mark.parametrize(
    ("fixed", "told"),
    [
        ({"zero_group": 8, "zero": 0}, "use zero 1, 2 or 3"),
        ({"zero_group": 4, "ep": 8}, "use a multiple of ep"),
        ({"zero_group": 1}, "use zero 0"),
        ({"zero_group": 3, "dp": 8}, "does not divide the 8 ranks"),
    ],
)
def test_groups_that_share_nothing_are_refused(fixed: dict[str, int], told: str) -> None:
    why = zero_group_refusal(fixed)
    assert why is not None
    assert told in why
    assert zero_group_refusal({"zero_group": 0, "zero": 0}) is None
    assert zero_group_refusal({"zero_group": 4, "dp": 8, "zero": 3, "ep": 2}) is None


def test_deepspeed_is_not_planned_with_groups() -> None:
    asked = {"model": "llama-2-13b", "cluster": "dgx-h100", "set": {"zero_group": 8}}
    with pytest.raises(BigplanError, match=r"0\.19\.8 has no MiCS.*plan with --engine native"):
        make_experiment({**asked, "engine": "deepspeed"})
    make_experiment({**asked, "engine": "fsdp2"})
    plan = Strategy(dp=16, zero=3, zero_group=8)
    assert "no MiCS" in str(refusal(MODEL, TRAINING, plan))


def test_groups_are_told_in_words() -> None:
    told = strategy_text(Strategy(dp=32, zero=3, zero_group=8))
    assert "ZeRO 3 in groups of 8 GPUs" in told
