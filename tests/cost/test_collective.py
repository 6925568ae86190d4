from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.cost.collective import (
    Group,
    all_reduce,
    data_group,
    reduce_scatter,
    send,
    tensor_group,
)
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_cluster
from bigplan.spec.cluster import Link

SOURCES = {"bandwidth": "test", "latency": "test", "half_size": "test"}
FAST = Link(name="in", bandwidth=100.0, latency=0.5, half_size=0, sources=SOURCES)
SLOW = Link(name="out", bandwidth=20.0, latency=2.0, half_size=0, sources=SOURCES)
NODES = find_cluster("dgx-h100").with_nodes(4).group


def test_a_ring_inside_a_node() -> None:
    group = Group(4, 4, FAST, None, 1.0)
    # Three quarters of 400 bytes at 100 bytes/s, three hops of half a second.
    assert reduce_scatter(400, group) == pytest.approx(3 + 3 * 0.5)
    assert all_reduce(400, group) == 2 * reduce_scatter(400, group)
    assert reduce_scatter(400, replace(group, size=1, per_node=1)) == 0.0


def test_a_ring_over_nodes_is_as_slow_as_its_slowest_link() -> None:
    group = Group(8, 4, FAST, SLOW, 0.5)
    # 7/8 of 400 bytes at half of 20 bytes/s; log2 of two nodes, plus one, hops of 2 s.
    assert group.crosses_nodes
    assert reduce_scatter(400, group) == pytest.approx(35 + 2 * 2.0)


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.sampled_from((2, 4, 8, 32)))
def test_more_bytes_take_longer_but_large_messages_pay_less(a: int, b: int, size: int) -> None:
    link = FAST.model_copy(update={"half_size": 10**6, "bandwidth": 1e9})
    group = Group(size, min(size, 8), link, link, 1.0)
    small, large = sorted((a, b))
    assert reduce_scatter(small, group) <= reduce_scatter(large, group)
    assert reduce_scatter(large, group) / large <= reduce_scatter(small, group) / small * (
        1 + 1e-12
    )


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


def test_messages_between_stages() -> None:
    assert send(10**8, Strategy(dp=32), NODES) == 0.0
    inside = send(10**8, Strategy(dp=2, tp=2, pp=8), NODES)
    across = send(10**8, Strategy(dp=4, tp=2, pp=4), NODES)
    assert 0 < inside < across
    # Each tensor-parallel rank sends its share of a hidden state.
    assert send(10**9, Strategy(dp=1, tp=8, pp=4), NODES) < send(
        10**9, Strategy(dp=8, tp=1, pp=4), NODES
    )
