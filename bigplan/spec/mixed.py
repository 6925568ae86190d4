"""Groups of unlike nodes as equal nodes, each with the worst figures that any of them has.

Every rank of a plan runs the same program and waits for the others. So a step over unlike nodes
takes as long as on as many nodes of the slowest kind, and each rank has room for what the smallest
node can hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from bigplan.errors import InputError
from bigplan.spec.cluster import Cluster, Member, NodeGroup, Nvme, Running
from bigplan.spec.gpu import Gpu
from bigplan.spec.link import Network
from bigplan.spec.part import DEFAULT, MachinePart
from bigplan.units import counted

P = TypeVar("P", bound=MachinePart)

# Figures of which more is worse; of all others less is.
_COSTS = frozenset(
    {"latency", "half_size", "numa_domains", "spread", "launch_overhead", "nics"}
) | {
    *("context_memory", "communicator_memory"),
    *("operator_overhead", "kernel_overhead", "kernel_start", "action_overhead"),
}
# What a part that leaves a figure out has in its place.
_ABSENT = {
    "adam_rate_beside_copies": "adam_rate",
    "node_host_to_device_beside_update": "node_host_to_device",
    "node_device_to_host_beside_update": "node_device_to_host",
    "reduce_scatter_bandwidth": "bandwidth",
    "all_gather_bandwidth": "bandwidth",
    "send_bandwidth": "bandwidth",
}
# A GPU's figures that are taken one by one; those of its products and attention stay together.
_OF_GPU = {"memory", "adam_rate"} | (_COSTS & Gpu.model_fields.keys())


def choices(cluster: Cluster) -> tuple[Cluster, ...]:
    """What can be planned as equal nodes: each group alone, and the strongest two, three, ...

    A group is as strong as all its GPUs' products. GPUs of several makers do not share a step, nor
    do nodes without a network. Raises InputError where two groups have one name.
    """
    names = [group.name for group in cluster.node_groups]
    if len(names) == 1:
        return (cluster,)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"cluster {cluster.name!r} has several node groups named {', '.join(twice)}; give "
            "every group a `name` of its own"
        )
    ranked = sorted(cluster.node_groups, key=_speed, reverse=True)
    joined = (ranked[:number] for number in range(2, len(ranked) + 1))
    together = [groups for groups in joined if _can_join(groups)]
    return tuple(_chosen(cluster, groups) for groups in (*([one] for one in ranked), *together))


def _speed(group: NodeGroup) -> float:
    """FLOP/s that the group's large products reach."""
    return group.gpus * large_products(group.gpu)


def _can_join(groups: Sequence[NodeGroup]) -> bool:
    devices = {group.gpu.device for group in groups}
    return len(devices) == 1 and all(group.inter_node is not None for group in groups)


def _chosen(cluster: Cluster, groups: Sequence[NodeGroup]) -> Cluster:
    names = [group.name for group in groups]
    rest = [group for group in cluster.node_groups if group.name not in names]
    return cluster.model_copy(
        update={
            "node_groups": (equal_nodes(groups),),
            "members": tuple(map(_member, groups)),
            "left_out": tuple(map(_member, rest)) or None,
        }
    )


def _member(group: NodeGroup) -> Member:
    return Member(name=group.name, nodes=group.nodes, gpus=group.gpus_per_node, gpu=group.gpu.name)


def equal_nodes(groups: Sequence[NodeGroup]) -> NodeGroup:
    """As many nodes as the groups have, each with the worst of every figure.

    The GPU whose products are slowest stands for all: its products and attention, with the least
    memory and memory bandwidth of any. Drives count as one drive with the least rates that a node
    has; a node has none where some node has none.
    """
    if len(groups) == 1:
        return groups[0]
    drives = [group.nvme for group in groups if group.nvme is not None]
    networks = [group.inter_node for group in groups if group.inter_node is not None]
    links = sorted((group.intra_node for group in groups), key=lambda link: link.bandwidth)
    names = [group.name for group in groups]
    return NodeGroup(
        name=" + ".join(names),
        nodes=sum(group.nodes for group in groups),
        gpus_per_node=min(group.gpus_per_node for group in groups),
        gpu=worst_gpu([group.gpu for group in groups]),
        host=worst([group.host for group in groups], names),
        pcie=worst([group.pcie for group in groups], names),
        nvme=_drives(drives, names) if len(drives) == len(groups) else None,
        intra_node=worst(links, names),
        inter_node=_network(networks, names),
        running=_running(groups),
    )


def _network(networks: Sequence[Network], names: Sequence[str]) -> Network:
    """The worst of them; where some do not say their cards, all count as if each GPU had one."""
    if any(network.nics is None for network in networks):
        networks = [network.without("nics") for network in networks]
    return worst(sorted(networks, key=lambda network: network.bandwidth), names)


def worst(parts: Sequence[P], names: Sequence[str], only: Iterable[str] | None = None) -> P:
    """The first part with the worst of every figure; sources tell where figures are from."""
    first = parts[0]
    fields = type(first).model_fields if only is None else only
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for field in fields:
        figures = [(_figure(part, field, parts), part) for part in parts]
        known = [(value, part) for value, part in figures if value or value is False]
        if not known:
            continue
        pick = max if field in _COSTS else min
        value, part = pick(known, key=lambda pair: pair[0])
        if value != getattr(first, field):
            values[field] = value
            sources[field] = f"the worst of {' and '.join(names)}: {_source(part, field)}"
    return first.replaced(values, sources) if values else first


def _figure(part: MachinePart, field: str, parts: Sequence[MachinePart]) -> float:
    """The part's figure; where it states none and another part does, what it has in its place.

    0: it has no such figure.
    """
    value = getattr(part, field)
    if value is None and field in _ABSENT and any(getattr(p, field) is not None for p in parts):
        value = getattr(part, _ABSENT[field])
    return float(value) if isinstance(value, float) else value if isinstance(value, int) else 0


def _source(part: MachinePart, field: str) -> str:
    return part.sources.get(field) or part.sources.get(_ABSENT.get(field, ""), DEFAULT)


def large_products(gpu: Gpu) -> float:
    """FLOP/s of large products in 16 bits, or in what the GPU has."""
    peaks = gpu.peak_flops
    precision = next((name for name in ("bf16", "fp16") if name in peaks), next(iter(peaks)))
    return gpu.large_products(precision)


def worst_gpu(gpus: Sequence[Gpu]) -> Gpu:
    """The GPU with the slowest products, with the least memory and memory bandwidth."""
    gpus = sorted(gpus, key=large_products)
    names = [gpu.name for gpu in gpus]
    slowest = worst(gpus, names, _OF_GPU)
    peaks = {
        p: rate for p, rate in slowest.peak_flops.items() if all(p in g.peak_flops for g in gpus)
    }
    narrow = min(gpus, key=lambda gpu: gpu.memory_bandwidth * gpu.memory_efficiency)
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    if peaks != slowest.peak_flops:
        values["peak_flops"] = peaks
        sources["peak_flops"] = f"precisions of all GPUs; {slowest.sources['peak_flops']}"
    if narrow is not gpus[0]:
        for field in ("memory_bandwidth", "memory_efficiency"):
            values[field] = getattr(narrow, field)
            sources[field] = f"the worst of {' and '.join(names)}: {_source(narrow, field)}"
    return slowest.replaced(values, sources) if values else slowest


def _drives(drives: Sequence[Nvme], names: Sequence[str]) -> Nvme:
    """One drive with the least that all drives of a node have."""
    return worst([_as_one(nvme) for nvme in drives], names)


def _as_one(nvme: Nvme) -> Nvme:
    known = {
        "drives": 1,
        "capacity": nvme.node_capacity,
        "read": nvme.node_read,
        "write": nvme.node_write,
        "both_ways": nvme.node_both_ways,
        "endurance": nvme.node_endurance,
    }
    values = {name: value for name, value in known.items() if value is not None}
    if nvme.drives == 1:
        return nvme
    told = counted(nvme.drives, "drive")
    return nvme.replaced(values, {n: f"of {told}: {_source(nvme, n)}" for n in values})


def _running(groups: Sequence[NodeGroup]) -> Running | None:
    """What a node costs in the mean, where all groups state it."""
    nodes = sum(group.nodes for group in groups)
    values: dict[str, float] = {}
    for field in ("price", "power"):
        stated = [getattr(group.running, field, None) for group in groups]
        known = [value for value in stated if value is not None]
        if len(known) == len(groups):
            every = sum(g.nodes * value for g, value in zip(groups, known, strict=True))
            values[field] = every / nodes
    told = f"the mean of {' and '.join(group.name for group in groups)}"
    return Running(**values, sources=dict.fromkeys(values, told)) if values else None
