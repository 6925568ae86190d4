from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.cost.collective import Group
from bigplan.cost.compute import gemm_seconds, operator_seconds
from bigplan.graph.graph import Attention, Collective, Gemm, Operator, Stream
from bigplan.spec.catalog import find_cluster, list_clusters

NODES = find_cluster("h200-1x").group
GPU = NODES.gpu
ALONE = Group(1, 1, NODES.intra_node, None, 1.0)


def _seconds(operator: Operator) -> float:
    return operator_seconds(operator, GPU, "bf16", 2, ALONE)


def test_a_large_gemm_is_bound_by_arithmetic_and_a_thin_one_by_memory() -> None:
    large = Gemm(8192, 8192, 8192)
    rate = GPU.peak("bf16") * GPU.gemm_efficiency * 8192 / (8192 + GPU.gemm_half_k)
    assert gemm_seconds(large, GPU, "bf16", 2) == pytest.approx(large.flops / rate)
    thin = Gemm(1, 8192, 8192)
    traffic = (8192 + 8192**2 + 8192) * 2 / (GPU.memory_bandwidth * GPU.memory_efficiency)
    assert gemm_seconds(thin, GPU, "bf16", 2) == pytest.approx(traffic)


@pytest.mark.parametrize("cluster", list_clusters())
@given(st.integers(1, 8192), st.integers(1, 8192), st.integers(1, 8192))
def test_no_gemm_beats_the_roofline(cluster: str, m: int, n: int, k: int) -> None:
    gpu, gemm = find_cluster(cluster).group.gpu, Gemm(m, n, k)
    seconds = gemm_seconds(gemm, gpu, "bf16", 2)
    assert gemm.flops / seconds <= gpu.peak("bf16")
    assert 2 * (m * k + k * n + m * n) / seconds <= gpu.memory_bandwidth * (1 + 1e-12)
    assert gemm_seconds(Gemm(m, n, k, count=3), gpu, "bf16", 2) == pytest.approx(3 * seconds)


def test_small_operators_cost_their_launches() -> None:
    assert _seconds(Stream(1.0, launches=3)) == 3 * GPU.launch_overhead
    assert _seconds(Gemm(1, 1, 1, count=4)) == 4 * GPU.launch_overhead
    assert _seconds(Attention(1.0)) == GPU.launch_overhead
    assert _seconds(Collective(10**9)) == 0.0  # one rank has nobody to talk to


def test_memory_bound_and_attention_operators() -> None:
    rate = GPU.memory_bandwidth * GPU.memory_efficiency
    assert _seconds(Stream(rate)) == pytest.approx(1.0)
    flops = GPU.peak("bf16")
    forward, backward = _seconds(Attention(flops)), _seconds(Attention(flops, backward=True))
    assert forward == pytest.approx(1 / GPU.attention_forward_efficiency)
    assert backward == pytest.approx(1 / GPU.attention_backward_efficiency)
