"""Rates of host memory by number of threads, and of the runtime's AdamW.

AdamW is timed on the CPU alone, on the CPU while all devices copy, and on a device. Its update is
that of mixed precision, which also writes the 16-bit parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bigplan.mechanics import CORES_BESIDE_COPIES
from bigplan.profile.bench import Bench, source, threads
from bigplan.profile.copies import Copier, CopyRates, by_way, copiers_of, copying
from bigplan.runtime.cpu.cores import Cores
from bigplan.runtime.cpu.native import Piece
from bigplan.runtime.generated import adamw_for, adamw_step
from bigplan.runtime.memory.slab import Slab, typed
from bigplan.runtime.operators import has_triton
from bigplan.runtime.optimizer.adamw import adamw_kernel
from bigplan.runtime.optimizer.fused import fused_step
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.training import Training
from bigplan.units import format_bandwidth, format_count, rounded

# AdamW's tensors take 4.5 GiB, a sum's 3 GiB. Of 1 GiB a server's 300 MiB of cache would hold
# enough to flatter the rate.
ELEMENTS = 2**28
FEW_ELEMENTS = 2**22  # at least, on a machine with little memory
ODD = 16 * 1237  # elements, see _odd
SUM_BYTES = 12  # per element: three fp32 tensors
# Per element, in mixed precision: parameter, gradient and two moments in fp32, and the 16-bit
# parameter that an update writes for the GPU.
ADAM_BYTES = 18
COPY_BYTES = 4 * 8  # per element, at most, of copies beside an update: two ways, both ends
# Bytes copied each way beside the update, by all devices together. Caches must not hold them, as
# with ELEMENTS: 64 MiB copied over and over never reach the memory that copies and update share,
# and of 512 MiB a server's 300 MiB of cache may hold a good part.
COPIED = 2**31
# The timed update also divides its gradients, as the runtime does where it clips. The divisor is
# near 1, so that gradients that are written back and divided again do not become denormals, which
# CPUs are slow with.
DIVISOR = 1.001
KERNEL = adamw_kernel(Optimizer(name="adamw"), 10, 1e-4, 0.1)


def measure_host(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """memory_bandwidth of the host: the best of several numbers of threads."""
    elements, tried = _elements(bench, SUM_BYTES), _thread_counts(bench)
    slab = Slab(SUM_BYTES * elements, pinned=False)
    a, b, c = typed(slab.take(SUM_BYTES * elements), torch.float32, (3, elements)).unbind()
    rates = {}
    for number in tried:
        with threads(number):
            once = bench.median_on_host(lambda: torch.add(a, b, out=c), seconds / len(tried))
        rates[number] = SUM_BYTES * elements / once
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
    """Measure the host's adam_rate alone and beside copies, and rates of copies beside it."""
    elements, tried = _elements(bench, ADAM_BYTES + COPY_BYTES), _thread_counts(bench)
    slab = Slab(ADAM_BYTES * elements, pinned=bench.cuda)
    try:
        step = partial(adam, slab.take(ADAM_BYTES * elements))
        adam(torch.empty(ADAM_BYTES * 16, dtype=torch.uint8))()  # kernels may have to be compiled
        rates = {}
        for number in tried:
            with threads(number), Cores() as cores:
                once = bench.median_on_host(step(cores), seconds / (len(tried) + 1))
            rates[number] = elements / once
        each = min(COPIED, COPY_BYTES // 4 * elements) // len(bench.devices)
        with copiers_of(bench, min(each, bench.device_memory() // 2)) as copiers:
            beside, copied = _beside(step, copiers, bench, seconds / (len(tried) + 1))
    finally:
        slab.close()
    if bench.cuda:
        torch.cuda.empty_cache()
    told = ", ".join(f"{n} {_giga(rate)}" for n, rate in rates.items())
    what = _updated(elements)
    update = rounded(elements / beside)
    host = group.host.replaced(
        {"adam_rate": rounded(rates[bench.cores]), "adam_rate_beside_copies": update},
        {
            "adam_rate": source(f"{what}, by threads: {told}"),
            "adam_rate_beside_copies": source(f"{what}, beside copies: {by_way(copied)}"),
        },
    )
    ways = {f"node_{way}_beside_update": rounded(rate) for way, rate in copied.rates.items()}
    how = source(f"chunks coming and leaving beside AdamW at {_giga(update)}")
    pcie = group.pcie.replaced(ways, dict.fromkeys(ways, how))
    return group.model_copy(update={"host": host, "pcie": pcie})


def measure_device_update(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """adam_rate of the device; on a CPU its share of the host's."""
    if not bench.cuda:
        rate = rounded(group.shared_by(group.gpus).rate_of_rank(group.host.adam_rate))
        how = source(f"the host's, divided by {group.gpus_per_node} device(s)")
        gpu = group.gpu.replaced({"adam_rate": rate}, {"adam_rate": how})
        return group.model_copy(update={"gpu": gpu})
    elements = _odd(min(2**28, bench.device_memory() // (ADAM_BYTES + 4)))
    step = device_adam(torch.empty(ADAM_BYTES * elements, dtype=torch.uint8, device=bench.device))
    rate = rounded(elements / bench.median(step, seconds))
    how = source(_updated(elements))
    gpu = group.gpu.replaced({"adam_rate": rate}, {"adam_rate": how})
    return group.model_copy(update={"gpu": gpu})


def adam(buffer: Tensor, cores: Cores | None = None) -> Callable[[], None]:
    """A step of the runtime's AdamW in mixed precision on `buffer`, uint8 [ADAM_BYTES * elements].

    The buffer holds, one after the other, parameters, gradients and both moments in fp32, then the
    bf16 parameters that UPDATE writes.
    """
    pieces = _pieces(buffer)

    def step() -> None:
        fused_step(pieces, KERNEL, DIVISOR, cores)

    return step


def device_adam(buffer: Tensor) -> Callable[[], None]:
    """The same on a GPU: by the generated kernel, where the runtime has it."""
    generated = (
        adamw_for(Training(sequence_length=1, global_batch=1), buffer.device)
        if has_triton()
        else None
    )
    if generated is None:
        return adam(buffer)
    factors = generated.factors(KERNEL.native.constants, DIVISOR, buffer.device)
    return partial(adamw_step, generated, factors, _pieces(buffer))


def _pieces(buffer: Tensor) -> list[Piece]:
    """What an update of a buffer works on."""
    elements = buffer.numel() // ADAM_BYTES
    wide = typed(buffer, torch.float32, (4, elements))
    copy = typed(buffer[16 * elements :], torch.bfloat16, (elements,))
    parameters, gradients, first, second = wide.unbind()
    wide.fill_(1e-3)  # neither zeros nor denormals, which some CPUs take longer for
    return [Piece(parameters, gradients, (first, second), copy)]


def _beside(
    step: Callable[[Cores], Callable[[], None]],
    copiers: list[Copier],
    bench: Bench,
    seconds: float,
) -> tuple[float, CopyRates]:
    """Seconds of an update while state passes through all devices, and the rates of its copies.

    The update runs on as many cores as the runtime uses beside copies.
    """
    with (
        threads(bench.cores),
        Cores(CORES_BESIDE_COPIES) if bench.cuda else Cores() as cores,
        copying(copiers, bench.clock, passing=bench.cuda) as reached,
    ):
        once = bench.median_on_host(step(cores), seconds)
    return once, reached


def _updated(elements: int) -> str:
    """What is updated, for a source."""
    return f"{format_count(elements)} fp32 parameters and their bf16 copy, gradients divided"


def _giga(rate: float) -> str:
    """Parameters a second, as cluster files write them."""
    return f"{rate / 1e9:.3g} G/s"


def _thread_counts(bench: Bench) -> tuple[int, ...]:
    """Half, three quarters and all of the cores; unless `quick` also a quarter, and one core."""
    quarters = {max(1, bench.cores * part // 4) for part in (2, 3, 4)}
    return tuple(sorted(quarters if bench.quick else quarters | {1, max(1, bench.cores // 4)}))


def _elements(bench: Bench, nbytes: int) -> int:
    """Elements that a probe may take, at `nbytes` each for all its tensors and copies."""
    room = bench.host_memory() // nbytes
    return _odd(max(FEW_ELEMENTS, min(ELEMENTS, room)))


def _odd(elements: int) -> int:
    """A few elements fewer: whole cache lines, but no power of two of them.

    Tensors that lie 256 MiB apart fall on the same lines of an EPYC's caches: AdamW then ran at
    0.16 G/s in place of 1.2.
    """
    return elements // 4096 * 4096 - ODD
