"""This machine as a Cluster, without torch: `bigplan detect`.

GPUs come from nvidia-smi; a shipped GPU type of that name gives what nvidia-smi does not tell.
Without a GPU the "device" is a part of host memory. Cores, memory and disk are measured for a few
seconds; `bigplan profile` measures longer, with torch, and measures the rest, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TypeVar

from bigplan.errors import InputError
from bigplan.paths import is_dir
from bigplan.spec.catalog import find_cluster, find_gpu, list_clusters, list_gpus
from bigplan.spec.cluster import MOST_GPUS, Cluster, Host, NodeGroup, Nvme, Pcie
from bigplan.spec.detect.machine import (
    FoundGpu,
    available_cores,
    available_memory,
    cpu_name,
    visible_gpus,
)
from bigplan.spec.detect.probes import PROBE_BYTES, probe_copy, probe_disk, probe_gemm
from bigplan.spec.files.document import Spec, load_document
from bigplan.spec.gpu import Gpu
from bigplan.spec.link import GpuLink
from bigplan.spec.mixed import worst, worst_gpu
from bigplan.spec.part import MachinePart
from bigplan.units import format_bytes, rounded

# GPUs that no shipped cluster has, and the GPU whose clusters have the same boards.
_SAME_BOARDS = {"Tesla V100-SXM2-16GB": "Tesla V100-SXM2-32GB"}

LANES = 16  # of a full PCIe slot

# AdamW in fp32 reads parameter, gradient and two moments and writes all but the gradient.
_ADAM_BYTES = 30

# Percent of the available memory: Ray stops workers where a node is fuller than 95%. Every plan
# itself counts what processes take besides tensors (cost/process.py).
_KEPT_FREE = 6


class Fallback(Spec):
    """Assumptions where nothing is known (fallback.yaml)."""

    gpu: Gpu
    pcie: Pcie
    gpu_link: GpuLink
    cpu: Gpu
    cpu_link: GpuLink


B = TypeVar("B", bound=MachinePart)


def detect(
    cpu_devices: int | None = None,
    folder: Path | None = None,
    *,
    drive: bool = True,
    gpus: Sequence[FoundGpu] | None = None,
) -> Cluster:
    """This machine as a cluster of one node.

    `cpu_devices` makes this many devices of cores and memory, even where there are GPUs. None takes
    the GPUs, or one such device where there are none. `folder` is where tensors may go on disk
    (default: the working directory); without `drive` they may not, and no disk is measured. `gpus`
    are the ones to describe (default: nvidia-smi's, as
    far as CUDA_VISIBLE_DEVICES leaves them). Raises InputError.
    """
    if cpu_devices is not None and not 1 <= cpu_devices <= MOST_GPUS:
        raise InputError(f"cpu_devices is {cpu_devices}; use 1 to {MOST_GPUS:,}")
    named, folder = folder is not None, (folder or Path.cwd()).resolve()
    if not is_dir(folder):
        raise InputError(f"{folder} is no folder; name an existing one for offloaded tensors")
    fallback = load_document(Path(__file__).with_name("fallback.yaml"), Fallback)
    today = f"measured here by bigplan detect, {date.today().isoformat()}"
    memory, cores = available_memory(), available_cores()
    copy = rounded(probe_copy(cores))
    if cpu_devices is not None:
        gpus = ()
    elif gpus is None:
        gpus = visible_gpus()
    kept_free = memory * (_KEPT_FREE if gpus else 50) // 100
    host = _host(_whole_mib(memory - kept_free), cores, copy, today)
    nvme = _nvme(folder, today) if drive else None
    if named and drive and nvme is None:
        raise InputError(
            f"{folder} takes no file of {format_bytes(PROBE_BYTES)}, so no tensors either: make it "
            "writable, make room, or name another folder"
        )
    if gpus:
        group = _gpu_group(gpus, fallback, host, nvme, today)
    else:
        group = _cpu_group(cpu_devices or 1, fallback, host, nvme, today)
    names = sorted({gpu.name for gpu in gpus}) or [group.gpu.name]
    what = f"{group.gpus_per_node} x {names[0]}"
    if len(names) > 1:
        what = f"{len(gpus)} GPUs ({', '.join(names)}; each counts as the worst of them)"
    return Cluster(
        name="this-machine", description=f"{what}, as bigplan detect saw it", node_groups=(group,)
    )


def _whole_mib(size: int) -> int:
    return max(size >> 20, 1) << 20


def _host(memory: int, cores: int, copy: float, today: str) -> Host:
    return Host(
        memory=memory,
        memory_bandwidth=copy,
        cores=cores,
        adam_rate=rounded(copy / _ADAM_BYTES),
        sources={
            "memory": f"{today}: a part of the memory that is available, leaving room for others",
            "memory_bandwidth": f"{today}: copy with {cores} threads, reads and writes",
            "cores": today,
            "adam_rate": f"estimate: {_ADAM_BYTES} bytes a parameter at memory_bandwidth",
        },
    )


def _nvme(folder: Path, today: str) -> Nvme | None:
    rates = probe_disk(folder)
    if rates is None:
        return None
    measured = f"{today}: {format_bytes(PROBE_BYTES)} with 4 threads, {rates.how}"
    return Nvme(
        capacity=_whole_mib(shutil.disk_usage(folder).free // 2),
        read=rounded(rates.read),
        write=rounded(rates.write),
        drives=1,
        latency=rounded(rates.latency),
        path=str(folder),
        sources={
            "capacity": f"{today}: half of what is free",
            "read": measured,
            "write": measured,
            "drives": "estimate: the folder is taken for one drive",
            "latency": f"{today}: reads of 4 KiB, {rates.how}",
        },
    )


def _cpu_group(
    devices: int, fallback: Fallback, host: Host, nvme: Nvme | None, today: str
) -> NodeGroup:
    gemm = probe_gemm()
    peak = rounded(gemm.peak / devices)
    shared = f"divided by {devices} devices" if devices > 1 else "all cores"
    overheads, told = _overheads(fallback.cpu, devices, host.cores)
    launch, launched = overheads["launch_overhead"], told["launch_overhead"]
    gpu = fallback.cpu.replaced(
        {
            "name": cpu_name(),
            # All devices together take as much again as the host keeps for tensors.
            "memory": _whole_mib(host.memory // (2 * devices)),
            "peak_flops": {"bf16": peak / 2, "fp32": peak},
            "multiprocessors": max(1, host.cores // devices),
            "memory_bandwidth": rounded(host.memory_bandwidth / devices),
            "gemm_half_k": rounded(gemm.half_k),
            "adam_rate": rounded(host.adam_rate / devices),
        }
        | overheads,
        {
            "memory": f"{today}: a quarter of the memory that is available, {shared}",
            "peak_flops": f"{today}: numpy's fp32 GEMM, {shared}; bf16 estimated as half of it",
            "multiprocessors": f"{today}: cores, {shared}",
            "memory_bandwidth": f"{today}: copy, {shared}",
            "gemm_half_k": f"{today}: numpy's fp32 GEMM at K 128 and K 1024",
        }
        | told,
    )
    rates = ("host_to_device", "device_to_host", "node_host_to_device", "node_device_to_host")
    pcie = fallback.pcie.replaced(
        dict.fromkeys(rates, host.memory_bandwidth / 2) | {"latency": launch},
        dict.fromkeys(rates, f"{today}: copy within host memory") | {"latency": launched},
    )
    return NodeGroup(
        name="cpu",
        gpus_per_node=devices,
        gpu=gpu,
        host=host,
        pcie=pcie,
        nvme=nvme,
        intra_node=fallback.cpu_link,
    )


OVERHEADS = ("launch_overhead", "operator_overhead", "action_overhead")


def _overheads(cpu: Gpu, devices: int, cores: int) -> tuple[dict[str, float], dict[str, str]]:
    """Launch times of CPU devices: those that outnumber the cores take turns on them."""
    times = max(1.0, devices / cores)
    values = {name: rounded(getattr(cpu, name) * times) for name in OVERHEADS}
    how = f", x {devices}/{cores}: {devices} devices take turns on {cores} core(s)"
    return values, {name: cpu.sources[name] + how * (times > 1) for name in OVERHEADS}


def _gpu_group(
    gpus: Sequence[FoundGpu], fallback: Fallback, host: Host, nvme: Nvme | None, today: str
) -> NodeGroup:
    """The node; unlike GPUs count as the worst of them, as every rank waits for the slowest."""
    kinds: dict[tuple[str, int], list[FoundGpu]] = {}
    for found in gpus:
        kinds.setdefault((found.name, found.memory), []).append(found)
    parts = [_parts(kind, fallback, today) for kind in kinds.values()]
    names = [name for name, _ in kinds]
    return NodeGroup(
        name="gpu",
        gpus_per_node=len(gpus),
        gpu=worst_gpu([gpu for gpu, _, _ in parts]),
        host=host,
        pcie=_node_rates(worst([pcie for _, pcie, _ in parts], names), len(gpus)),
        nvme=nvme,
        intra_node=worst(sorted((link for _, _, link in parts), key=_bandwidth), names),
    )


def _bandwidth(link: GpuLink) -> float:
    return link.bandwidth


def _parts(gpus: Sequence[FoundGpu], fallback: Fallback, today: str) -> tuple[Gpu, Pcie, GpuLink]:
    """GPUs that are alike, and what connects each of them to the host and to the others."""
    found = gpus[0]
    shipped = {find_gpu(name).name: name for name in list_gpus()}.get(found.name, "")
    gpu = _quoted(find_gpu(shipped), shipped) if shipped else fallback.gpu
    if like := _like(found.name, len(gpus)):
        pcie = _quoted(like.group.pcie, like.name)
        link = _quoted(like.group.intra_node, like.name)
        if 0 < found.pcie_width < LANES:  # of a slot: the cluster's cards may have more
            pcie = _pcie_of(found, pcie)
    else:
        pcie, link = _pcie_of(found, fallback.pcie), fallback.gpu_link
    gpu = gpu.replaced(
        {"name": found.name, "memory": found.memory},
        {"memory": f"{today}: nvidia-smi's memory.total"},
    )
    return gpu, pcie, link


def _like(gpu: str, number: int) -> Cluster | None:
    """The shipped cluster with these GPUs whose nodes have as many, else a few more, else most."""
    gpu = _SAME_BOARDS.get(gpu, gpu)
    clusters = [find_cluster(name) for name in list_clusters()]
    known = [cluster for cluster in clusters if cluster.group.gpu.name == gpu]

    def far(cluster: Cluster) -> tuple[bool, int]:
        more = cluster.group.gpus_per_node - number
        return more < 0, abs(more)

    return min(known, key=far, default=None)


def _quoted(block: B, shipped: str) -> B:
    """The block with sources that name the shipped description it was taken from."""
    sources = {name: f"as {shipped}: {text}" for name, text in block.sources.items()}
    return block.replaced({}, sources)


def _pcie_of(found: FoundGpu, pcie: Pcie) -> Pcie:
    """Rates from the link's generation and width: a lane of PCIe 3.0 carries 0.985 GB/s."""
    if not (found.pcie_generation and found.pcie_width):
        return pcie
    rate = 0.8 * 0.985e9 * 2.0 ** (found.pcie_generation - 3) * found.pcie_width
    source = f"estimate: 0.8 of PCIe {found.pcie_generation}.0 x{found.pcie_width}"
    names = ("host_to_device", "device_to_host")
    return pcie.replaced(dict.fromkeys(names, rate), dict.fromkeys(names, source))


def _node_rates(pcie: Pcie, gpus: int) -> Pcie:
    """The node's rate with these GPUs: at most what they take together, at least one GPU's."""
    values, sources = {}, {}
    for direction in ("host_to_device", "device_to_host"):
        alone, node = getattr(pcie, direction), f"node_{direction}"
        together = min(max(getattr(pcie, node), alone), alone * gpus)
        if together != getattr(pcie, node):
            values[node] = together
            sources[node] = f"{pcie.sources[node]}; limited to what {gpus} GPUs can take"
    return pcie.replaced(values, sources)
