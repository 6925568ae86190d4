"""Device memory's rate, and what launching a kernel costs."""

from __future__ import annotations

import torch

from bigplan.profile.bench import Bench, rounded, source, threads
from bigplan.spec.cluster import NodeGroup
from bigplan.units import format_bandwidth, format_bytes, format_seconds

GPU_BYTES = 2**30  # of a copied tensor: far beyond any L2 cache
# On a CPU the device stands in for a GPU in models that are small enough to run here: hidden states
# of so many bytes stay in caches, and a rate from DRAM would be several times too low.
CPU_BYTES = (2**18, 2**20, 2**22)
CHAIN = 50  # rounds of four operators whose launching is timed


def measure_stream(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """memory_bandwidth and memory_efficiency of the device."""
    if not bench.cuda:
        return _of_caches(group, bench, seconds)
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


def _of_caches(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    rates = []
    with threads(bench.threads):
        for nbytes in CPU_BYTES:
            a, b, c = (torch.ones(nbytes // 4) for _ in range(3))
            once = bench.median(lambda a=a, b=b, c=c: torch.add(a, b, out=c), seconds / 3)  # type: ignore[misc]
            rates.append(3 * nbytes / once)
    rate = sorted(rates)[1]
    how = source(
        f"sums of tensors of 256 KiB to 4 MiB, which stay in caches, {bench.threads} thread(s)"
    )
    values = {"memory_bandwidth": rounded(rate), "memory_efficiency": 1.0}
    gpu = group.gpu.replaced(values, dict.fromkeys(values, how))
    return group.model_copy(update={"gpu": gpu})


def measure_launch(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """launch_overhead: the host's time per kernel of small operators recorded by autograd."""
    x = torch.zeros(16, 16, device=bench.device)
    w = torch.zeros(16, 16, device=bench.device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(CHAIN):
            y = torch.nn.functional.silu(((y @ w) + x) * x)
        if bench.cuda:
            torch.cuda.synchronize(bench.device)

    with threads(1):
        once = bench.median_on_host(chain, seconds) / (4 * CHAIN)
    how = source(f"{4 * CHAIN} small operators with autograd, {format_seconds(rounded(once))} each")
    gpu = group.gpu.replaced({"launch_overhead": rounded(once)}, {"launch_overhead": how})
    return group.model_copy(update={"gpu": gpu})
