"""Seconds of operators on one GPU: a roofline with a smooth size curve and launch overhead."""

from __future__ import annotations

from bigplan.cost.collective import Group, all_reduce
from bigplan.graph.graph import Attention, Collective, Gemm, Operator, Stream
from bigplan.spec.cluster import Gpu


def operator_seconds(
    operator: Operator, gpu: Gpu, precision: str, element: int, tensor_group: Group
) -> float:
    """Seconds of one operator; never less than launching its kernels takes."""
    if isinstance(operator, Collective):
        return operator.count * all_reduce(operator.nbytes, tensor_group)
    if isinstance(operator, Gemm):
        launches = operator.count
        seconds = gemm_seconds(operator, gpu, precision, element)
    elif isinstance(operator, Attention):
        launches = 1
        efficiency = (
            gpu.attention_backward_efficiency
            if operator.backward
            else gpu.attention_forward_efficiency
        )
        seconds = operator.flops / (gpu.peak(precision) * efficiency)
    else:
        assert isinstance(operator, Stream)
        launches = operator.launches
        seconds = operator.nbytes / (gpu.memory_bandwidth * gpu.memory_efficiency)
    return max(seconds, launches * gpu.launch_overhead)


def gemm_seconds(gemm: Gemm, gpu: Gpu, precision: str, element: int) -> float:
    """The slower of arithmetic and memory.

    Arithmetic runs at peak x efficiency x K / (K + K0): a tile's prologue and epilogue cost as
    much as K0 more of the inner dimension, whatever K is.
    """
    rate = gpu.peak(precision) * gpu.gemm_efficiency * gemm.k / (gemm.k + gpu.gemm_half_k)
    elements = gemm.count * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
    traffic = elements * element / (gpu.memory_bandwidth * gpu.memory_efficiency)
    return max(gemm.flops / rate, traffic)
