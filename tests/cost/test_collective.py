from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log2
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.cost.collective import (
    FORWARDED,
    PATTERNS,
    Group,
    LayerGroups,
    all_gather,
    all_reduce,
    all_to_all,
    beside_compute,
    collective_seconds,
    context_group,
    data_group,
    dispatch,
    expert_data_group,
    expert_group,
    reduce_scatter,
    send,
    taken_from_compute,
    tensor_group,
)
from bigplan.graph.operators import Collective
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_cluster
from bigplan.spec.link import GpuLink, Network

L = TypeVar("L", GpuLink, Network)
SOURCES = {"bandwidth": "test", "latency": "test", "half_size": "test"}
FAST = GpuLink(name="in", bandwidth=100.0, latency=0.5, half_size=0, sources=SOURCES)
SLOW = Network(name="out", bandwidth=20.0, latency=2.0, half_size=0, sources=SOURCES)
NODES = find_cluster("dgx-h100").with_nodes(4).group
INSIDE = Group(4, 4, FAST, None, 1.0)
ACROSS = Group(8, 4, FAST, SLOW, 0.5)


def _without_latency(link: L) -> L:
    return link.model_copy(update={"latency": 0.0})


def test_a_ring_inside_a_node() -> None:
    # Three quarters of 400 bytes at 100 bytes/s, three hops of half a second.
    assert reduce_scatter(400, INSIDE) == pytest.approx(3 + 3 * 0.5)


@pytest.mark.parametrize("exchange", [all_reduce, reduce_scatter, all_gather, all_to_all])
def test_no_bytes_take_no_time(exchange: Callable[[int, Group], float]) -> None:
    """As of a tied head whose norm has no weights; links have a rate of 0 there."""
    sized = {"half_size": 100}
    inside, across = FAST.model_copy(update=sized), SLOW.model_copy(update=sized)
    assert exchange(0, replace(ACROSS, intra=inside, inter=across)) == 0.0


def test_one_rank_exchanges_nothing() -> None:
    alone = replace(INSIDE, size=1, per_node=1)
    assert reduce_scatter(400, alone) == all_reduce(400, alone) == 0.0


@pytest.mark.parametrize(
    ("size", "latency"),
    [
        (2, 2 * 1 * 0.5),  # a ring's 2 (n - 1) hops and a tree's 2 log2 n are equally many
        (4, 2 * 2 * 0.5),  # 4 beat 6
        (64, 2 * 6 * 0.5),  # 12 beat 126
    ],
)
def test_an_all_reduce_moves_a_rings_bytes_in_a_trees_steps(size: int, latency: float) -> None:
    group = Group(size, size, FAST, None, 1.0)
    moved = 2 * 400 * (size - 1) / size / 100.0
    assert all_reduce(400, group) == pytest.approx(moved + latency)


def test_a_ring_of_unlike_hops_may_beat_a_tree() -> None:
    # 8 ranks, 4 a node: a ring's 6 hops inside at 0.5 s and one across at 2 s, twice, are 10 s;
    # a tree pays the network for each of its 2 x 3 steps, 12 s.
    assert 2 * log2(8) * 2.0 > 2 * (6 * 0.5 + 1 * 2.0)
    assert all_reduce(400, ACROSS) == pytest.approx(2 * 35 + 10)


def test_a_ring_over_nodes_is_as_slow_as_its_slowest_link() -> None:
    # 7/8 of 400 bytes at half of 20 bytes/s; six hops inside the two nodes, one between them.
    assert ACROSS.crosses_nodes
    assert reduce_scatter(400, ACROSS) == pytest.approx(35 + 6 * 0.5 + 1 * 2.0)
    # With a network as fast as that the node's link is the slowest.
    fast_network = SLOW.model_copy(update={"bandwidth": 1000.0})
    assert reduce_scatter(400, replace(ACROSS, inter=fast_network)) == pytest.approx(3.5 + 5)


def test_one_rank_a_node_knows_only_the_network() -> None:
    group = Group(4, 1, FAST, SLOW, 0.125)
    # 3/4 of 400 bytes at an eighth of 20 bytes/s, three hops between nodes.
    assert reduce_scatter(400, group) == pytest.approx(300 / 2.5 + 3 * 2.0)


def test_half_the_rate_at_the_half_size() -> None:
    link = FAST.model_copy(update={"half_size": 400})
    group = replace(INSIDE, intra=link)
    assert reduce_scatter(400, group) == pytest.approx(2 * 3 + 3 * 0.5)


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.sampled_from((2, 4, 8, 32)))
def test_more_bytes_take_longer_but_large_messages_pay_less(a: int, b: int, size: int) -> None:
    link = FAST.model_copy(update={"half_size": 10**6, "bandwidth": 1e9})
    network = SLOW.model_copy(update={"half_size": 10**6, "bandwidth": 1e9})
    group = Group(size, min(size, 8), link, network, 1.0)
    small, large = sorted((a, b))
    for once in (reduce_scatter, all_reduce):
        assert once(small, group) <= once(large, group)
        assert once(large, group) / large <= once(small, group) / small * (1 + 1e-12)


@given(st.integers(1, 10**9), st.sampled_from((2, 4, 8, 32, 128)))
def test_an_all_reduce_is_at_most_a_scatter_and_a_gather(nbytes: int, size: int) -> None:
    group = Group(size, min(size, 8), FAST, SLOW, 1.0)
    # The same bytes twice; its latency is less than theirs where it takes a tree.
    free = replace(group, intra=_without_latency(FAST), inter=_without_latency(SLOW))
    moved = 2 * reduce_scatter(nbytes, free)
    assert moved < all_reduce(nbytes, group) <= 2 * reduce_scatter(nbytes, group) * (1 + 1e-12)
    assert all_reduce(nbytes, free) == pytest.approx(moved)


def test_collectives_by_pattern() -> None:
    for pattern, once in (("all_gather", 4.5), ("reduce_scatter", 4.5), ("all_reduce", 8.0)):
        collective = Collective("c", pattern, 400, count=3)  # type: ignore[arg-type]
        assert collective_seconds(collective, INSIDE) == pytest.approx(3 * once)


def test_an_exchange_sends_each_other_rank_its_part() -> None:
    """3/4 of 400 bytes at 100 bytes/s, after a message to each of three ranks."""
    assert all_to_all(400, INSIDE) == pytest.approx(3 + 3 * 0.5)
    slower = replace(INSIDE, intra=FAST.model_copy(update={"send_bandwidth": FAST.bandwidth / 2}))
    assert all_to_all(400, slower) == pytest.approx(6 + 3 * 0.5)
    exchange = Collective("c", "all_to_all", 400, count=2)
    alone = replace(INSIDE, size=1, per_node=1)
    assert LayerGroups(alone, INSIDE, alone).seconds(exchange) == pytest.approx(2 * 4.5)
    assert LayerGroups(INSIDE, alone, alone).seconds(exchange) == 0.0


def rows(each: int, groups: tuple[int, int] = (1, 1)) -> Collective:
    return Collective("rows", "all_to_all", 800, rows=each, groups=groups)


def test_rows_go_to_their_experts_over_both_links_at_once() -> None:
    """Eight ranks, four on a node with half of its network, at 100 and 20 bytes/s.

    Of 800 bytes 3/8 stay inside a node: 3 s. A half leaves it, that of four ranks over 10 bytes/s:
    160 s. Latencies: six hops inside, one between.
    """
    latency = 6 * 0.5 + 2.0
    assert dispatch(rows(2), ACROSS, once=False) == pytest.approx(160 + latency)
    quick = replace(ACROSS, inter=SLOW.model_copy(update={"bandwidth": 1e9}))
    assert dispatch(rows(2), quick, once=False) == pytest.approx(3 + latency)
    assert dispatch(rows(2), INSIDE, once=False) == pytest.approx(all_to_all(800, INSIDE))
    assert dispatch(rows(2), replace(INSIDE, size=1, per_node=1), once=False) == 0.0


def test_a_token_goes_once_to_each_node_and_rank_with_its_experts() -> None:
    """Both rows of a token are on one of two nodes in half of all cases: it goes to 1.5 of them.

    Half of these copies leave the node: 0.75 of a row's 400 bytes, of four ranks at 10 bytes/s. Of
    8 ranks it goes to 8 (1 - (7/8)^2) = 1.875, each from another rank of its node in 3 cases of 4,
    and FORWARDED of that is not hidden. Messages go at once: the latency is one.
    """
    inside, across = 400 * 1.875 * 0.75 / 100, 0.75 * 400 * 4 / 10
    took = dispatch(rows(2), ACROSS, once=True)
    assert took == pytest.approx(across + FORWARDED * inside + 2.0)
    assert dispatch(rows(2), INSIDE, once=True) == pytest.approx(400 * 1.75 * 0.75 / 100 + 0.5)


def test_a_token_of_some_groups_of_experts_reaches_fewer_ranks() -> None:
    """Four rows in one of two groups: those of four ranks are on two of them, of two on one."""
    four = dispatch(rows(4, (2, 1)), INSIDE, once=True) - 0.5
    assert four == pytest.approx(200 * 2 * (1 - 0.5**4) * 0.75 / 100)
    two = replace(INSIDE, size=2, per_node=2)
    assert dispatch(rows(4, (2, 1)), two, once=True) - 0.5 == pytest.approx(200 * 0.5 / 100)
    # Two of four groups on two ranks: both are on one rank in a third of all cases, else each rank
    # has one of them and none of its rows once in 16.
    halves = dispatch(rows(4, (4, 2)), two, once=True) - 0.5
    reached = 2 * (1 - (1 / 6 + 4 / 6 * 0.5**4))
    assert halves == pytest.approx(200 * reached * 0.5 / 100)


def test_ranks_of_experts_are_neighbours_and_fold_into_those_of_a_stage() -> None:
    """16 of 32 GPUs a stage, 8 a node: of 4 ranks that have all experts, 4 have the same ones."""
    strategy = Strategy(dp=8, tp=2, pp=2, ep=4)
    group = expert_group(strategy, NODES, folded=True)
    same = expert_data_group(strategy, NODES, folded=True)
    assert (group.size, group.per_node, group.inter_share) == (4, 4, 0.5)
    assert (same.size, same.per_node, same.inter_share) == (4, 2, 0.25)
    wide = Strategy(dp=16, pp=2, ep=16)
    group, same = expert_group(wide, NODES), expert_data_group(wide, NODES)
    assert (group.size, group.per_node, group.inter_share) == (16, 8, 1.0)
    assert (same.size, same.per_node) == (1, 1)


def test_ranks_of_experts_that_tensor_parallel_ranks_split_have_one_tensor_place() -> None:
    """In the native runtime: 8 GPUs of a node have 4 of each place, 2 of which have all experts."""
    strategy = Strategy(dp=4, cp=2, tp=2, pp=2, ep=2)
    group, same = expert_group(strategy, NODES), expert_data_group(strategy, NODES)
    assert (group.size, group.per_node, group.inter_share) == (2, 2, 0.25)
    assert (same.size, same.per_node, same.inter_share) == (4, 2, 0.25)
    across = Strategy(dp=8, tp=2, pp=2, ep=8)
    group, same = expert_group(across, NODES), expert_data_group(across, NODES)
    assert (group.size, group.per_node, group.inter_share) == (8, 4, 0.5)
    assert (same.size, same.per_node) == (1, 1)


def test_context_parallel_ranks_share_states_and_are_neighbours() -> None:
    strategy = Strategy(dp=2, cp=4, tp=2)
    group = context_group(strategy, NODES)
    assert (group.size, group.per_node, group.crosses_nodes) == (4, 4, False)
    shards = data_group(strategy, NODES)
    assert (shards.size, shards.per_node, shards.crosses_nodes) == (8, 4, True)


def test_groups_of_a_strategy() -> None:
    tp8 = Strategy(dp=4, tp=8)
    assert (tensor_group(tp8, NODES).size, tensor_group(tp8, NODES).crosses_nodes) == (8, False)
    group = data_group(tp8, NODES)
    # One rank a node: each of the eight groups gets an eighth of the node's network.
    assert (group.size, group.per_node, group.inter_share) == (4, 1, 1 / 8)
    whole = data_group(Strategy(dp=32), NODES)
    assert (whole.size, whole.per_node, whole.inter_share) == (32, 8, 1.0)
    near = data_group(Strategy(dp=2, tp=2, pp=8), NODES)
    assert (near.size, near.per_node, near.crosses_nodes) == (2, 2, False)


def test_tensor_parallelism_beyond_a_node_takes_all_its_network() -> None:
    group = tensor_group(Strategy(dp=1, tp=16), NODES)
    assert (group.size, group.per_node, group.inter_share) == (16, 8, 1.0)
    assert group.crosses_nodes


def test_without_a_switch_a_group_has_the_wires_between_its_own() -> None:
    """Four V100s, two links to each other GPU: a pair has two of six, four have all."""
    nodes = find_cluster("v100-4x").group
    link = nodes.intra_node
    pair = tensor_group(Strategy(dp=2, tp=2), nodes).intra
    assert pair.bandwidth == pytest.approx(link.bandwidth / 3)
    assert data_group(Strategy(dp=2, tp=2), nodes).intra == pair
    assert tensor_group(Strategy(dp=1, tp=4), nodes).intra == link
    assert tensor_group(Strategy(dp=4, tp=2), NODES).intra == NODES.intra_node
    seconds = send(10**8, Strategy(dp=1, tp=2, pp=2), nodes)
    rate = pair.bandwidth * 1e8 / (1e8 + link.half_size)
    assert seconds == pytest.approx(1e8 / rate + link.latency)


def test_messages_between_stages() -> None:
    assert send(10**8, Strategy(dp=32), NODES) == 0.0
    inside = send(10**8, Strategy(dp=2, tp=2, pp=8), NODES)
    across = send(10**8, Strategy(dp=4, tp=2, pp=4), NODES)
    assert 0 < inside < across


def test_messages_of_a_nodes_last_stage_leave_it() -> None:
    """With several stages on a node one of two messages of its first and last stage crosses."""
    alone = NODES.model_copy(update={"nodes": 1})
    for strategy, share in ((Strategy(dp=4, pp=8), 0.5), (Strategy(dp=8, pp=4), 1.0)):
        inside = send(10**8, Strategy(dp=4, pp=2), alone)
        network = NODES.inter_node
        assert network is not None
        rate = network.bandwidth / 8 * 1e8 / (1e8 + network.half_size)
        across = 1e8 / rate + network.latency
        assert send(10**8, strategy, NODES) == pytest.approx((1 - share) * inside + share * across)


@pytest.mark.parametrize(
    ("nics", "nodes", "stage", "parts"),
    [
        (None, 2, 1, 8),  # a card for each GPU: seven are idle while one sends
        (16, 2, 1, 8),
        (1, 2, 1, 1),  # the only sender has the only card
        (1, 4, 1, 2),  # nodes in the middle send forward and back
        (1, 4, 4, 8),
        (1, 4, 8, 8),
        (4, 4, 1, 4),  # one card of four
        (4, 4, 2, 4),
        (2, 2, 4, 4),  # two senders a card
    ],
)
def test_messages_share_the_cards_of_a_node(
    nics: int | None, nodes: int, stage: int, parts: int
) -> None:
    network = SLOW.model_copy(update={"bandwidth": 8e9, "latency": 0.0, "nics": nics})
    group = NODES.model_copy(update={"inter_node": network, "nodes": nodes})
    strategy = Strategy(dp=stage, pp=8 * nodes // stage)
    inside = send(10**9, strategy, NODES.model_copy(update={"nodes": 1, "gpus_per_node": 32}))
    across = parts * 10**9 / 8e9
    expected = (inside + across) / 2 if stage < 8 else across
    assert send(10**9, strategy, group) == pytest.approx(expected)


def test_tensor_parallel_ranks_send_their_share() -> None:
    """With sequence parallelism the bytes are a rank's share already; else they are split now."""
    network = NODES.inter_node
    assert network is not None
    whole, split = Strategy(dp=1, tp=8, pp=4, sequence_parallel=False), Strategy(dp=1, tp=8, pp=4)
    assert send(8 * 10**8, whole, NODES) == send(10**8, split, NODES)
    rate = network.bandwidth / 8 * 1e8 / (1e8 + network.half_size)
    assert send(10**8, split, NODES) == pytest.approx(1e8 / rate + network.latency)


def test_stages_of_one_node_send_over_its_link() -> None:
    link = NODES.intra_node
    seconds = send(10**8, Strategy(dp=1, tp=2, pp=4), NODES.model_copy(update={"nodes": 1}))
    rate = link.bandwidth * 1e8 / (1e8 + link.half_size)
    assert seconds == pytest.approx(1e8 / rate + link.latency)


def test_each_kind_at_its_own_bandwidth() -> None:
    """Gloo's reduce-scatter is an all-reduce of which a part is kept."""
    own = {"reduce_scatter_bandwidth": 50.0, "all_gather_bandwidth": 150.0, "send_bandwidth": 25.0}
    group = replace(INSIDE, intra=_without_latency(FAST.model_copy(update=own)))
    # Three quarters of 400 bytes.
    assert reduce_scatter(400, group) == pytest.approx(300 / 50)
    assert all_gather(400, group) == pytest.approx(300 / 150)
    assert all_reduce(400, group) == pytest.approx(600 / 100)
    nodes = NODES.model_copy(update={"nodes": 1, "intra_node": group.intra})
    assert send(400, Strategy(dp=1, tp=2, pp=4), nodes) == pytest.approx(400 / 25)
    plain = replace(INSIDE, intra=FAST)
    assert PATTERNS["all_gather"](400, plain) == PATTERNS["reduce_scatter"](400, plain)


def test_collectives_and_compute_slow_each_other() -> None:
    shares = {"beside_compute": 0.5, "compute_beside": 0.8}
    inside = replace(INSIDE, intra=FAST.model_copy(update=shares))
    assert beside_compute(3.0, inside) == pytest.approx(6.0)
    assert taken_from_compute(6.0, inside, None) == pytest.approx(1.2)  # a fifth
    assert taken_from_compute(6.0, inside, 0.5) == 3.0  # the GPU's own comes first
    across = replace(inside, size=8, inter=SLOW)  # what the network leaves counts
    assert (beside_compute(3.0, across), taken_from_compute(6.0, across, None)) == (3.0, 0.0)
