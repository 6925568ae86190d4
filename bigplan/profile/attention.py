"""Torch's fused attention, forward and backward, as a share of the peak."""

from __future__ import annotations

from math import exp, log

import torch
from torch import Tensor

from bigplan.cost.compute import Device, attention_seconds
from bigplan.graph.operators import Attention
from bigplan.profile.bench import DTYPES, Bench, grouped_heads, rounded, source, threads
from bigplan.spec.cluster import Gpu, NodeGroup

HEAD = 128  # columns of a head: the efficiencies are those of such heads
# Batch, tokens, heads. Lengths and tokens that models are trained at: of a step at 1,024 tokens
# attention is a thirtieth, and its short kernels would weigh as much as the long ones.
GPU_CASES = ((8, 2048, 32), (8, 4096, 32), (4, 8192, 32), (1, 16384, 32))
GROUP = 4  # query heads to a key and value head, as Llama 3 has them
CPU_CASES = ((1, 256, 4), (1, 512, 4), (1, 1024, 2))
BACKWARD = 2.5  # FLOPs of the backward beside the forward's: five products for two
sdpa = torch.nn.functional.scaled_dot_product_attention


def measure_attention(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """attention_forward_efficiency and attention_backward_efficiency of `sdpa`."""
    cases = GPU_CASES if bench.cuda else CPU_CASES
    precision = bench.precisions(group.gpu)[0]
    shares: dict[bool, list[float]] = {False: [], True: []}
    with threads(bench.threads), bench.conditions() as conditions:
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
    what = f"causal, heads of {HEAD}, {told} tokens, {precision}{conditions}"
    how = f"sdpa: {source(what)}"
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
    dtype = DTYPES[precision]
    grouped = grouped_heads(bench.device, dtype)
    key_values = heads // GROUP if grouped else heads
    # In memory [b, s, heads, d], as the blocks have it.
    q, k, v = (
        torch.randn(batch, length, some, HEAD, device=bench.device).to(dtype).transpose(1, 2)
        for some in (heads, key_values, key_values)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def attend() -> Tensor:
        return sdpa(q, k, v, is_causal=True, enable_gqa=grouped)

    forward = bench.median(attend, seconds / 3)
    out = attend()
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
