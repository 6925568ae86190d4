"""Sizes of micro-batches for unlike groups of nodes."""

from itertools import product
from math import gcd

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bigplan.cost.compute import Device, gemm_seconds
from bigplan.graph.operators import Gemm
from bigplan.spec.catalog import find_cluster
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.unequal import (
    CLOSE,
    MOST,
    as_equal,
    best_sizes,
    first_speeds,
    most_ranks,
    step_of,
    together,
)

H100, A100 = (find_cluster(name).group for name in ("dgx-h100", "dgx-a100-80g"))


def groups(*nodes: int) -> list[NodeGroup]:
    """So many nodes of a DGX A100 each."""
    return [A100.model_copy(update={"name": str(n), "nodes": k}) for n, k in enumerate(nodes)]


@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=3),
    st.lists(st.floats(1, 9), min_size=3, max_size=3),
    st.integers(1, 100).map(lambda times: 16 * times),
)
def test_no_other_sizes_have_a_shorter_step(
    nodes: list[int], speeds: list[float], batch: int
) -> None:
    found, speeds = groups(*nodes), speeds[: len(nodes)]
    sizes = best_sizes(found, speeds, batch)
    every = [
        other
        for other in product(range(1, MOST + 1), repeat=len(nodes))
        if gcd(*other) == 1 and batch % together(found, other) == 0
    ]
    assume(every)
    least = min(step_of(found, other, speeds) for other in every)
    # Sizes far from the speeds' proportions are not looked at, though a batch may divide by them.
    near = sizes is not None and step_of(found, sizes, speeds) <= least * (1 + CLOSE)
    assert near or all(
        any(abs(b - max(other) * s / max(speeds)) >= 1 for b, s in zip(other, speeds, strict=True))
        for other in every
        if step_of(found, other, speeds) <= least * (1 + CLOSE)
    )
    if sizes is not None:
        assert batch % sum(8 * n * size for n, size in zip(nodes, sizes, strict=True)) == 0


def test_sizes_are_as_the_speeds_where_the_batch_divides() -> None:
    two = groups(2, 4)
    assert best_sizes(two, (3.0, 1.0), 16 * 3 + 32) == (3, 1)
    assert best_sizes(two, (1.0, 1.0), 48) == (1, 1)
    assert best_sizes(two, (2.5, 1.0), 16 * 5 + 32 * 2) == (5, 2)
    # Powers of two divide by neither; 16 x 2 + 32 divides 64, 16 x 10 + 32 x 3 divides 256.
    assert best_sizes(two, (2.5, 1.0), 512, most=8) == (2, 1)
    assert best_sizes(two, (2.8, 1.0), 512) == (10, 3)
    assert best_sizes(two, (2.8, 1.0), 512, without={(10, 3)}) == (2, 1)
    assert best_sizes(two, (2.8, 1.0), 7) is None
    # Of replicas of 16 GPUs there are three, with 5, 1 and 1 sequences.
    assert best_sizes(two, (2.8, 1.0), most_ranks(two) * 7) == (5, 1)


def test_work_by_tokens_is_faster_where_a_group_has_less_of_it() -> None:
    alike = as_equal([H100, A100], (4, 1))
    # Four times an A100's products are more than an H100's: the H100 is the slower one.
    assert alike.gpu.peak_flops["bf16"] == H100.gpu.peak_flops["bf16"]
    assert alike.gpu.memory_bandwidth == H100.gpu.memory_bandwidth
    assert alike.intra_node.bandwidth == H100.intra_node.bandwidth
    # Work by parameters is as slow as the slower group's.
    assert alike.gpu.adam_rate == A100.gpu.adam_rate
    assert alike.inter_node is not None
    assert A100.inter_node is not None
    assert alike.inter_node.bandwidth == A100.inter_node.bandwidth
    assert alike.gpu.memory == min(H100.gpu.memory, A100.gpu.memory)
    twice = as_equal([H100, A100], (2, 1))
    assert twice.gpu.peak_flops["bf16"] == 2 * A100.gpu.peak_flops["bf16"]
    assert "2 times" in twice.gpu.sources["peak_flops"]


def test_first_speeds_are_those_of_large_products() -> None:
    """As prices have them: an H100's run at its power limit, an A100's have none."""
    large = Gemm("w", 2**18, 2**18, 2**18)
    priced = [large.flops / gemm_seconds(large, Device(g.gpu, "bf16")) for g in (H100, A100)]
    assert H100.gpu.gemm_power_limit
    assert first_speeds([H100, A100]) == pytest.approx(priced, rel=0.005)
