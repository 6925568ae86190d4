"""Host memory by number of threads, and AdamW on the CPU: alone, and while all devices copy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bigplan.profile.bench import Bench, rounded, source, threads
from bigplan.profile.copies import Copier, copiers_of, copying
from bigplan.runtime.adamw import adamw_kernel
from bigplan.runtime.cores import Cores
from bigplan.runtime.fused import Piece, fused_step
from bigplan.runtime.slab import Slab, typed
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.optimizer import Optimizer
from bigplan.units import format_bandwidth, format_count

# 4 GiB of AdamW's four tensors, 3 GiB of a sum's three: of 1 GiB, a server's 300 MiB of cache holds
# enough to flatter the rate.
ELEMENTS = 2**28
FEW_ELEMENTS = 2**22  # on a machine of little memory
ODD = 16 * 1237
COPIED = 64 * 2**20  # bytes of a copy beside the update
# Where gradients are clipped the runtime divides them in the same pass and writes them back: that
# is timed. So near to 1 that repeated division brings no denormals, which CPUs are slow with.
DIVISOR = 1.001


def measure_host(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """memory_bandwidth of the host: the best of several numbers of threads."""
    elements, tried = _elements(bench, 3), _thread_counts(bench)
    slab = Slab(12 * elements, pinned=False)
    a, b, c = typed(slab.take(12 * elements), torch.float32, (3, elements)).unbind()
    rates = {}
    for number in tried:
        with threads(number):
            once = bench.median_on_host(lambda: torch.add(a, b, out=c), seconds / len(tried))
        rates[number] = 12 * elements / once
    slab.close()
    best = max(rates, key=lambda number: rates[number])
    told = ", ".join(f"{n} {format_bandwidth(rounded(rate))}" for n, rate in rates.items())
    how = source(f"sums of {format_count(elements)} fp32 elements by threads: {told}")
    host = group.host.replaced(
        {"memory_bandwidth": rounded(rates[best]), "cores": bench.cores},
        {"memory_bandwidth": how, "cores": source("those this process may use")},
    )
    return group.model_copy(update={"host": host})


def measure_cpu_update(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """adam_rate of the host alone and beside copies, and what copies reach beside it."""
    elements, tried = _elements(bench, 4), _thread_counts(bench)
    slab = Slab(16 * elements, pinned=bench.cuda)
    try:
        tensors = typed(slab.take(16 * elements), torch.float32, (4, elements))
        rates = {}
        for number in tried:
            with threads(number), Cores() as cores:
                once = bench.median_on_host(adam(tensors, cores), seconds / (len(tried) + 1))
            rates[number] = elements / once
        with copiers_of(bench, min(COPIED, 4 * elements)) as copiers:
            beside, copied = _beside(tensors, copiers, bench, seconds / (len(tried) + 1))
    finally:
        slab.close()
    if bench.cuda:
        torch.cuda.empty_cache()
    told = ", ".join(f"{n} {_giga(rate)}" for n, rate in rates.items())
    what = f"{format_count(elements)} fp32 parameters, gradients divided"
    update = rounded(elements / beside)
    together = format_bandwidth(rounded(copied))
    host = group.host.replaced(
        {"adam_rate": rounded(rates[bench.cores]), "adam_rate_beside_copies": update},
        {
            "adam_rate": source(f"{what}, by threads: {told}"),
            "adam_rate_beside_copies": source(f"the same beside copies of {together} both ways"),
        },
    )
    pcie = group.pcie.replaced(
        {"node_both_ways_beside_update": rounded(copied)},
        {"node_both_ways_beside_update": source(f"beside AdamW at {_giga(update)}")},
    )
    return group.model_copy(update={"host": host, "pcie": pcie})


def measure_device_update(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """adam_rate of the device; on a CPU its share of the host's."""
    if not bench.cuda:
        rate = rounded(group.host.adam_rate / group.gpus_per_node)
        how = source(f"the host's, divided by {group.gpus_per_node} device(s)")
        gpu = group.gpu.replaced({"adam_rate": rate}, {"adam_rate": how})
        return group.model_copy(update={"gpu": gpu})
    elements = min(2**28, bench.device_memory() // 20) - ODD
    step = adam(torch.zeros(4, elements, device=bench.device))
    rate = rounded(elements / bench.median(step, seconds))
    how = source(f"{format_count(elements)} fp32 parameters, gradients divided")
    gpu = group.gpu.replaced({"adam_rate": rate}, {"adam_rate": how})
    return group.model_copy(update={"gpu": gpu})


def adam(tensors: Tensor, cores: Cores | None = None) -> Callable[[], None]:
    """A step of the runtime's AdamW on four rows: parameters, gradients and both moments."""
    parameters, gradients, first, second = tensors.unbind()
    tensors.fill_(1e-3)  # neither zeros nor denormals, which some CPUs take longer for
    kernel = adamw_kernel(Optimizer(name="adamw"), 10, 1e-4, 0.1)
    pieces = [Piece(parameters, gradients, (first, second))]

    def step() -> None:
        fused_step(pieces, kernel, DIVISOR, cores)

    return step


def _beside(
    tensors: Tensor, copiers: list[Copier], bench: Bench, seconds: float
) -> tuple[float, float]:
    """Seconds of an update while all copy, and the bytes/s that they reach."""
    with (
        threads(bench.cores),
        Cores() as cores,
        copying(copiers, bench.clock) as reached,
    ):
        once = bench.median_on_host(adam(tensors, cores), seconds)
    return once, reached.total


def _giga(rate: float) -> str:
    """Parameters a second, as cluster files write them."""
    return f"{rate / 1e9:.3g} G/s"


def _thread_counts(bench: Bench) -> tuple[int, ...]:
    """Half of the cores, three quarters and all; where there is time also one and a quarter."""
    quarters = {max(1, bench.cores * part // 4) for part in (2, 3, 4)}
    return tuple(sorted(quarters if bench.quick else quarters | {1, max(1, bench.cores // 4)}))


def _elements(bench: Bench, tensors: int) -> int:
    """fp32 elements of each of so many tensors, which lie one after the other.

    Not a power of two: tensors 256 MiB apart fell on the same lines of an EPYC's caches, and AdamW
    ran at 0.16 G/s in place of 1.2.
    """
    room = bench.host_memory() // (4 * tensors)
    return max(FEW_ELEMENTS, min(ELEMENTS, room)) // 4096 * 4096 - ODD
