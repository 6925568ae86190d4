"""Device memory's rate, and what launching a kernel costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bigplan.cost.framework import NATIVE
from bigplan.cost.host import host_seconds
from bigplan.cost.price import device_of
from bigplan.graph.build import build_graph
from bigplan.graph.operators import Stream
from bigplan.graph.strategy import Strategy
from bigplan.profile.bench import Bench, source, threads
from bigplan.runtime.operators import RmsRule, rms_norm, rotary, swiglu
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.units import format_bandwidth, format_bytes, format_seconds, rounded

GPU_BYTES = 2**30  # of a copied tensor: far beyond any L2 cache
# A CPU is measured with a llama-style layer whose tensors of 1 and 2.75 MiB stay in caches. A copy
# from DRAM would give a rate several times too low, one within caches several times too high.
TOKENS = 512
LAYER = ModelSpec(
    name="streams",
    layers=1,
    hidden=512,
    heads=8,
    kv_heads=4,
    ffn=1408,
    vocab=256,
    max_sequence_length=TOKENS,
    source="made for measuring",
)
TRAINING = Training(sequence_length=TOKENS, global_batch=1, precision="fp32")
STREAMED = ("input norm", "rotary embedding", "activation")
CHAIN = 50  # rounds of four operators whose launching is timed


def measure_stream(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """Measure memory_bandwidth and memory_efficiency of the device."""
    if not bench.cuda:
        return _of_layers(group, bench, seconds)
    nbytes = min(GPU_BYTES, bench.device_memory() // 4)
    a, b = torch.empty(2, nbytes, dtype=torch.uint8, device=bench.device).unbind()
    with bench.conditions() as conditions:
        rate = 2 * nbytes / bench.median(lambda: b.copy_(a), seconds)
    gpu, how = group.gpu, f"a copy of {format_bytes(nbytes)} reaches {format_bandwidth(rate)}"
    if rate > gpu.memory_bandwidth or gpu.sources["memory_bandwidth"].startswith("estimate"):
        values = {"memory_bandwidth": rounded(rate), "memory_efficiency": 1.0}
        how += "; the datasheet's bandwidth is not known, so this stands for it"
    else:
        values = {"memory_efficiency": rounded(rate / gpu.memory_bandwidth)}
        how += f" of {format_bandwidth(gpu.memory_bandwidth)}"
    sources = dict.fromkeys(values, source(f"{how}{conditions}"))
    return group.model_copy(update={"gpu": gpu.replaced(values, sources)})


def _of_layers(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """A CPU's rate in the operators that layers stream: norm, rotary embedding, activation.

    The tensors stay in caches, as in models that train on a CPU. There torch's operators are far
    from a copy's rate: an activation computes exponentials, a rotation reads every other column.
    """
    one = build_graph(LAYER, TRAINING, Strategy(dp=1)).kinds["block"]
    streams = [
        operator
        for operator in (*one.forward, *one.backward)
        if isinstance(operator, Stream) and operator.name in STREAMED
    ]
    device = device_of(group, TRAINING, NATIVE)
    with threads(bench.threads):
        once = bench.median(_streaming(), seconds)
    python = host_seconds(tuple(streams), device, NATIVE) - group.gpu.action_overhead
    moved = sum(stream.nbytes * stream.eager for stream in streams)
    rate = moved / max(once - python, once / 2)
    what = ", ".join(STREAMED)
    how = source(
        f"{what} of {TOKENS} tokens x {LAYER.hidden}, both ways, {bench.threads} thread(s)"
    )
    values = {"memory_bandwidth": rounded(rate), "memory_efficiency": 1.0}
    gpu = group.gpu.replaced(values, dict.fromkeys(values, how))
    return group.model_copy(update={"gpu": gpu})


def _streaming() -> Callable[[], object]:
    """A function that runs LAYER's operators in STREAMED both ways, as the runtime does."""
    length, hidden, ffn = TRAINING.sequence_length, LAYER.hidden, LAYER.ffn

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    x, gate, up = (tensor(1, length, width) for width in (hidden, ffn, ffn))
    weight = tensor(hidden)
    q, k = (tensor(1, length, heads, LAYER.head_dim) for heads in (LAYER.heads, LAYER.kv_heads))
    angles = torch.randn(length, LAYER.head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    inputs = (x, weight, gate, up, q, k)

    def run() -> None:
        outputs = (
            *rms_norm(x, weight, RmsRule(LAYER.norm_epsilon)),
            rotary(q, cos, sin),
            rotary(k, cos, sin),
            swiglu(gate, up),
        )
        gradients = [output.detach() for output in outputs]
        torch.autograd.grad(outputs, inputs, gradients)

    return run


def measure_launch(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """Measure launch_overhead: the host's time per kernel of small operators with autograd."""
    x = torch.zeros(16, 16, device=bench.device)
    w = torch.zeros(16, 16, device=bench.device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(CHAIN):
            y = torch.nn.functional.silu(((y @ w) + x) * x)
        if bench.cuda:
            torch.cuda.synchronize(bench.device)

    with threads(1):
        median = bench.median_on_host if bench.cuda else bench.median
        once = median(chain, seconds) / (4 * CHAIN)
    how = source(f"{4 * CHAIN} small operators with autograd, {format_seconds(rounded(once))} each")
    gpu = group.gpu.replaced({"launch_overhead": rounded(once)}, {"launch_overhead": how})
    return group.model_copy(update={"gpu": gpu})
