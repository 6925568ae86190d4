"""Torch's fused attention, forward and backward, as a share of the peak."""

from __future__ import annotations

from math import exp, log

import torch

from bigplan.cost.compute import Device, attention_seconds
from bigplan.graph.operators import Attention
from bigplan.profile.bench import Bench, rounded, source, threads
from bigplan.profile.gemm import DTYPES
from bigplan.spec.cluster import Gpu, NodeGroup

HEAD = 128  # columns of a head: the efficiencies are those of such heads
GPU_CASES = ((8, 1024, 32), (2, 4096, 32), (1, 8192, 32), (1, 16384, 16))  # batch, tokens, heads
CPU_CASES = ((1, 256, 4), (1, 512, 4), (1, 1024, 2))
BACKWARD = 2.5  # FLOPs of the backward beside the forward's: five products for two
sdpa = torch.nn.functional.scaled_dot_product_attention


def measure_attention(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """attention_forward_efficiency and attention_backward_efficiency of `sdpa`."""
    cases = GPU_CASES if bench.cuda else CPU_CASES
    precision = bench.precisions(group.gpu)[0]
    shares: dict[bool, list[float]] = {False: [], True: []}
    with threads(bench.threads):
        for batch, length, heads in cases:
            for backward, took in zip(
                (False, True),
                _seconds(batch, length, heads, precision, bench, seconds / len(cases)),
                strict=True,
            ):
                flops = 2.0 * batch * heads * length * length * HEAD
                flops *= BACKWARD if backward else 1.0
                work = Attention("attention", flops, 0.0, backward, HEAD, length)
                shares[backward].append(_at_peak(work, group.gpu, precision) / took)
    told = ", ".join(str(length) for _, length, _ in cases)
    how = f"sdpa: {source(f'causal, heads of {HEAD}, {told} tokens, {precision}')}"
    gpu = group.gpu
    values, sources = {}, {}
    for backward, name in (
        (False, "attention_forward_efficiency"),
        (True, "attention_backward_efficiency"),
    ):
        # Least squares of the logarithms: the geometric mean.
        share = rounded(exp(sum(map(log, shares[backward])) / len(cases)))
        before = getattr(gpu, name)
        values[name] = ({} if gpu.device == "cpu" else before) | {"sdpa": share}
        others = [kernel for kernel in values[name] if kernel != "sdpa"]
        rest = f"; {', '.join(others)}: {gpu.sources[name]}" if others else ""
        sources[name] = how + rest
    return group.model_copy(update={"gpu": gpu.replaced(values, sources)})


def _seconds(
    batch: int, length: int, heads: int, precision: str, bench: Bench, seconds: float
) -> tuple[float, float]:
    """Forward's and backward's."""
    # In memory [b, s, heads, d], as the blocks have it.
    shape = batch, length, heads, HEAD
    q, k, v = (
        torch.randn(shape, device=bench.device).to(DTYPES[precision]).transpose(1, 2)
        for _ in range(3)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()
    forward = bench.median(lambda: sdpa(q, k, v, is_causal=True), seconds / 3)
    out = sdpa(q, k, v, is_causal=True)
    gradient = torch.randn_like(out)

    def back() -> None:
        torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    return forward, bench.median(back, 2 * seconds / 3)


def _at_peak(work: Attention, gpu: Gpu, precision: str) -> float:
    """Seconds by the cost model with an efficiency of one."""
    perfect = gpu.model_copy(
        update={
            "attention_forward_efficiency": {"sdpa": 1.0},
            "attention_backward_efficiency": {"sdpa": 1.0},
        }
    )
    return attention_seconds(work, Device(perfect, precision, ("sdpa",)))
