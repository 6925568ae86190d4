"""Torch's fused attention, forward and backward, as a share of the peak."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from bigplan.graph.operators import Attention
from bigplan.profile.bench import DTYPES, Bench, source, threads
from bigplan.profile.fit import fit_attention
from bigplan.profile.load import grouped_heads
from bigplan.spec.cluster import NodeGroup
from bigplan.units import rounded

HEAD = 128  # columns of a head; the efficiencies hold for heads of this width
# Batch, tokens, heads. The lengths are those that models are trained at: at 1,024 tokens attention
# is only a thirtieth of a step. All cases have the same number of tokens, so that they differ in
# length alone: on an H200 the backward of 2 sequences of 4,096 tokens runs at 426 TFLOP/s, of 8 at
# 454 (benchmarks/results/2026-11-21-h200-kernels).
GPU_CASES = ((8, 4096, 32), (4, 8192, 32), (2, 16384, 32), (1, 32768, 32))
GROUP = 4  # query heads to a key and value head, as Llama 3 has them
CPU_CASES = ((1, 256, 4), (1, 512, 4), (1, 1024, 2))
BACKWARD = 2.5  # the backward's FLOPs over the forward's: five products against two
sdpa = torch.nn.functional.scaled_dot_product_attention


def measure_attention(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """Measure attention_*_efficiency and attention_*_half_length of `sdpa`, both ways."""
    cases = GPU_CASES if bench.cuda else CPU_CASES
    gpu, precision = group.gpu, bench.precisions(group.gpu)[0]
    with threads(bench.threads), bench.conditions() as conditions:
        timed = _timings(cases, precision, bench, seconds)
    told = ", ".join(str(kernel.length) for kernel, _ in timed[False])
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for backward, way in ((False, "forward"), (True, "backward")):
        kernels, times = zip(*timed[backward], strict=True)
        fit = fit_attention(kernels, times, gpu, precision)
        what = f"causal, heads of {HEAD}, {told} tokens, met to {fit.worst:.0%} at worst"
        how = f"sdpa: {source(f'{what}, {precision}{conditions}')}"
        for figure, value in (("efficiency", fit.efficiency), ("half_length", fit.half_length)):
            name = f"attention_{way}_{figure}"
            before = {} if gpu.device == "cpu" else getattr(gpu, name) or {}
            others = [kernel for kernel in before if kernel != "sdpa"]
            rest = f"; {', '.join(others)}: {gpu.sources[name]}" if others else ""
            values[name] = before | {"sdpa": rounded(value)}
            sources[name] = how + rest
    return group.model_copy(update={"gpu": gpu.replaced(values, sources)})


def _timings(
    cases: Sequence[tuple[int, int, int]], precision: str, bench: Bench, seconds: float
) -> dict[bool, list[tuple[Attention, float]]]:
    """Kernels with their seconds, by whether they are backward; the shortest sequences first.

    Cases that would exceed their time are left out. The two shortest stay in any case: the fit has
    two parameters.
    """
    timed: dict[bool, list[tuple[Attention, float]]] = {False: [], True: []}
    each, rate = seconds / len(cases), inf
    for batch, length, heads in sorted(cases, key=lambda case: case[1]):
        flops = 2.0 * batch * heads * length * length * HEAD
        work = (1 + BACKWARD) * flops
        # Forward and backward each run at least three times.
        if len(timed[False]) >= 2 and 3 * work / rate > 4 * each:
            continue
        forward, backward = _seconds(batch, length, heads, precision, bench, each)
        rate = work / (forward + backward)
        kernel = Attention("attention", flops, 0.0, False, HEAD, length)
        again = Attention("attention", BACKWARD * flops, 0.0, True, HEAD, length)
        timed[False].append((kernel, forward))
        timed[True].append((again, backward))
    return timed


def _seconds(
    batch: int, length: int, heads: int, precision: str, bench: Bench, seconds: float
) -> tuple[float, float]:
    """Median seconds of the forward and of the backward."""
    dtype = DTYPES[precision]
    grouped = grouped_heads(bench.device, dtype)
    key_values = heads // GROUP if grouped else heads
    # The memory layout is [b, s, heads, d], as in the runtime's blocks.
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
