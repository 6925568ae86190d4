"""What one rank gets of its node's rates: copies, drives, updates."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from bigplan.graph.graph import ElementSizes
from bigplan.mechanics import CORES_BESIDE_COPIES
from bigplan.spec.cluster import Host, NodeGroup, Nvme, Pcie
from bigplan.spec.gpu import Gpu
from bigplan.spec.moments import Moments
from bigplan.spec.sharing import NodeSharing
from bigplan.units import PerNode, PerRank

# Bytes that AdamW in mixed precision moves for an element; `adam_rate` is the rate of that. Three
# fp32 values are read and written, the gradient is read, the 16-bit parameter is written.
ADAM_BYTES = 30
# The share of a copy's rate alone that remains while state passes through the GPU and the CPU runs
# AdamW. Both use the host's memory, and copies that write to it wait less. Measured in training on
# an H200's machine: 34 of 54.7 and 47 of 54.5 GB/s
# (benchmarks/results/2026-11-22-h200-one-at-a-time).
INTO_BESIDE_UPDATE = 0.62
OFF_BESIDE_UPDATE = 0.86
# Elements/s that a core updates where moments are in fewer bits and lie in its caches. bf16 is
# measured with AVX-512 on one core of an EPYC 9004 (benchmarks/moments.py host), where fp32 takes
# 1.5 G/s, more than any core's part of its memory. 8 bits take 0.30 G/s there; in training on a
# rented H200's machine 12 of 16 cores, which may be halves of cores, reached 1.25 G/s with the
# time of memory, which served fp32 at 3.55 G/s (benchmarks/results/2026-11-27-h200-spread).
CORE_UPDATES: dict[Moments, float] = {"bf16": 1.0e9, "int8": 0.132e9}
# The same of a GPU's multiprocessor: 93.2 G/s on the 132 of an H200, where fp32 and bf16 reach
# 4.2 TB/s (benchmarks/results/2026-11-27-h200-spread).
MULTIPROCESSOR_UPDATES: dict[Moments, float] = {"int8": 0.706e9}
# The rate of torch's AdamW over the generated one's, which `adam_rate` is: torch divides gradients
# and copies parameters by kernels of their own. 77.4 and 135.4 G/s on an H200, torch 2.11
# (benchmarks/results/2026-11-28-h200-again).
TORCH_UPDATES = 0.57


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second, or elements per second, that one rank gets while all ranks work."""

    h2d: PerRank
    d2h: PerRank
    nvme_read: PerRank
    nvme_write: PerRank
    host_memory: PerRank
    device_memory: PerRank
    cpu_update: PerRank  # elements/s
    gpu_update: PerRank  # elements/s
    state_in: PerRank  # bytes/s of state that passes through the GPU
    state_out: PerRank
    latency: float = 0.0  # seconds per move


def _passing(
    pcie: Pcie, h2d: PerRank, d2h: PerRank, sharing: NodeSharing
) -> tuple[PerRank, PerRank]:
    """Bytes/s at which a rank's state comes to the GPU, and leaves it, beside the CPU's update.

    `h2d`, `d2h`: the rates of the rank's copies alone.
    """
    into, off = pcie.node_host_to_device_beside_update, pcie.node_device_to_host_beside_update
    return (
        min(h2d, sharing.rate_of_rank(into)) if into else PerRank(INTO_BESIDE_UPDATE * h2d),
        min(d2h, sharing.rate_of_rank(off)) if off else PerRank(OFF_BESIDE_UPDATE * d2h),
    )


def _drives(nvme: Nvme | None, sharing: NodeSharing) -> tuple[PerRank, PerRank]:
    """Bytes/s that a rank reads and writes; while both go on, if that was measured.

    Both go on while there is state on a drive. As many bytes come as go, so each gets half.
    """
    if nvme is None:
        return PerRank(1.0), PerRank(1.0)
    half = PerNode((nvme.node_both_ways or inf) / 2)
    read, write = min(nvme.node_read, half), min(nvme.node_write, half)
    return sharing.rate_of_rank(read), sharing.rate_of_rank(write)


def _cpu_update(host: Host, sizes: ElementSizes) -> PerNode:
    """Elements/s that all cores of a node update; beside copies, if that was measured.

    Memory binds. Where moments are in fewer bits cores compute for about as long, and what they
    compute does not hide what they wait for: two cores that reach 2.2 G/s of bf16 in their caches
    and 2.1 by bytes of memory take 1.0. In 8 bits 48 cores of four H200s' machine updated 2.95 G/s,
    3.0 by this sum and 5.0 by the longer of both (benchmarks/results/2026-11-27-h200-x4-whole).
    """
    by_memory = (host.adam_rate_beside_copies or host.adam_rate) / _part(sizes)
    if sizes.moments not in CORE_UPDATES:
        return PerNode(by_memory)
    computed = host.cores * float(CORES_BESIDE_COPIES) * CORE_UPDATES[sizes.moments]
    return PerNode(1 / (1 / by_memory + 1 / computed))


def _gpu_update(gpu: Gpu, sizes: ElementSizes, *, generated: bool) -> PerRank:
    """Elements/s that a GPU updates, likewise."""
    by_memory, each = gpu.adam_rate / _part(sizes), MULTIPROCESSOR_UPDATES.get(sizes.moments, inf)
    if gpu.runs_kernels and sizes.moments == "fp32" and not generated:
        by_memory *= TORCH_UPDATES
    return PerRank(min(by_memory, gpu.multiprocessors * each))


def _part(sizes: ElementSizes) -> float:
    """Rates are those of AdamW in mixed precision; other updates follow from their bytes."""
    return sizes.update_bytes / ADAM_BYTES


def rates_of(
    nodes: NodeGroup, sharing: NodeSharing, sizes: ElementSizes, *, generated: bool = True
) -> Rates:
    """A rank's part of its node's rates, at most what its GPU's link takes.

    `generated`: the GPU's AdamW is bigplan's own kernel, else torch's.
    """
    pcie, host, gpu = nodes.pcie, nodes.host, nodes.gpu
    read, write = _drives(nodes.nvme, sharing)
    h2d = min(pcie.host_to_device, sharing.rate_of_rank(pcie.node_host_to_device))
    d2h = min(pcie.device_to_host, sharing.rate_of_rank(pcie.node_device_to_host))
    state_in, state_out = _passing(pcie, h2d, d2h, sharing)
    return Rates(
        h2d=h2d,
        d2h=d2h,
        nvme_read=read,
        nvme_write=write,
        host_memory=sharing.rate_of_rank(host.memory_bandwidth),
        device_memory=PerRank(gpu.memory_bandwidth * gpu.memory_efficiency),
        cpu_update=sharing.rate_of_rank(_cpu_update(host, sizes)),
        gpu_update=_gpu_update(gpu, sizes, generated=generated),
        state_in=state_in,
        state_out=state_out,
        latency=pcie.latency,
    )
