"""A cluster as data: nodes with host, drives, GPUs and links; every number has its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    GetPydanticSchema,
    Tag,
    model_validator,
)

from bigplan.errors import InputError, RefusedError, quoted
from bigplan.spec.files import shipped
from bigplan.spec.files.document import LONGEST_NAME, Spec
from bigplan.spec.files.problems import KeyPath
from bigplan.spec.gpu import NamedGpu
from bigplan.spec.link import NamedLink, NamedNetwork
from bigplan.spec.part import Changeable, MachinePart, left_out_units
from bigplan.spec.sharing import NodeSharing
from bigplan.units import (
    Bandwidth,
    Bytes,
    NodeBandwidth,
    NodeRate,
    PerNode,
    PerRank,
    Power,
    Price,
    RankBandwidth,
    Seconds,
    format_bytes,
)

MOST_NODES = 10**5  # with eight GPUs each, as many GPUs as the largest clusters have
MOST_GPUS = 1024  # of a node


class Host(MachinePart):
    """The CPU side of one node."""

    memory: Bytes = Field(gt=0)
    """memory that training may use, tensors and processes together, such as 120 GiB"""
    tensor_memory: Bytes | None = Field(default=None, gt=0)
    """of it, what a plan may place there at most; absent: all that processes leave"""
    memory_bandwidth: NodeBandwidth = Field(gt=0)
    """achieved DRAM bandwidth, reads and writes together"""
    cores: int = Field(gt=0, le=10**5)
    adam_rate: NodeRate = Field(gt=0)
    """parameters per second of fp32 AdamW with all the node's cores, such as 4 G/s"""
    adam_rate_beside_copies: NodeRate | None = Field(default=None, gt=0)
    """the same while all the node's GPUs copy both ways: what plans count on where it is known"""
    numa_domains: int = Field(default=1, gt=0, le=10**5)
    """parts that memory_bandwidth divides into: a process that binds nothing gets one's share"""

    @property
    def domain_bandwidth(self) -> PerRank:
        """Bytes/s of one NUMA domain's memory, which a process that binds nothing gets at most."""
        return PerRank(self.memory_bandwidth / self.numa_domains)


class Pcie(MachinePart):
    """Copies between pinned host memory and GPU memory."""

    host_to_device: RankBandwidth = Field(gt=0)
    """per GPU, when it copies alone, such as 55 GB/s"""
    device_to_host: RankBandwidth = Field(gt=0)
    """per GPU, when it copies alone"""
    node_host_to_device: NodeBandwidth = Field(gt=0)
    """all the node's GPUs together"""
    node_device_to_host: NodeBandwidth = Field(gt=0)
    """all the node's GPUs together"""
    latency: Seconds = Field(ge=0)
    """per copy, such as 10 us"""
    both_ways: RankBandwidth | None = Field(default=None, gt=0)
    """per GPU, both directions added up while it copies both ways; not used in plans"""
    node_both_ways: NodeBandwidth | None = Field(default=None, gt=0)
    """the same for all the node's GPUs together; not used in plans"""
    node_host_to_device_beside_update: NodeBandwidth | None = Field(default=None, gt=0)
    """all the node's GPUs, chunk after chunk, while the others leave and the CPU runs AdamW: what
    optimizer state comes to the GPU at"""
    node_device_to_host_beside_update: NodeBandwidth | None = Field(default=None, gt=0)
    """the other direction meanwhile: what it leaves the GPU at"""


class Nvme(MachinePart):
    """The drives of one node; rates and capacity are per drive."""

    capacity: Bytes = Field(gt=0)
    """usable bytes per drive, such as 2 TB"""
    read: Bandwidth = Field(gt=0)
    """sequential, per drive, such as 6.5 GB/s"""
    write: Bandwidth = Field(gt=0)
    """sequential and sustained, per drive"""
    drives: int = Field(gt=0, le=10**5)
    """of a node; leave `nvme` out where there are none, or plan without them by --cap nvme=0"""
    latency: Seconds = Field(ge=0)
    """per request"""
    both_ways: Bandwidth | None = Field(default=None, gt=0)
    """per drive, bytes read and written while both go on: plans count on no more"""
    endurance: Bytes | None = Field(default=None, gt=0)
    """bytes that may be written in a drive's life, such as 1.2 PB; absent: not stated"""
    path: str | None = None
    """folder on these drives for offloaded tensors"""

    @property
    def node_capacity(self) -> int:
        """Bytes on all drives of the node."""
        return self.capacity * self.drives

    @property
    def node_read(self) -> PerNode:
        """Bytes/s from all drives of the node."""
        return PerNode(self.read * self.drives)

    @property
    def node_write(self) -> PerNode:
        """Bytes/s to all drives of the node."""
        return PerNode(self.write * self.drives)

    @property
    def node_both_ways(self) -> PerNode | None:
        """Bytes/s from and to all drives of the node while both go on; None: not measured."""
        return None if self.both_ways is None else PerNode(self.both_ways * self.drives)

    @property
    def node_endurance(self) -> int | None:
        """Bytes that may be written to all drives of the node; None: not stated."""
        return None if self.endurance is None else self.endurance * self.drives


class Running(MachinePart):
    """What a running node costs, in money and in power, whoever owns it."""

    price: Price | None = Field(default=None, gt=0)
    """of a node, such as 55.04 USD/h"""
    power: Power | None = Field(default=None, gt=0)
    """of a node, such as 10.2 kW; the source says whether it is the node's or its GPUs' alone"""


class NodeGroup(Spec):
    """Equal nodes. A GPU or link may be written as a shipped name."""

    name: str = Field(max_length=LONGEST_NAME)
    nodes: int = Field(default=1, gt=0, le=MOST_NODES)
    gpus_per_node: int = Field(gt=0, le=MOST_GPUS)
    gpu: NamedGpu
    """a shipped type such as a100-sxm4-80gb, or all its figures"""
    host: Host
    """all its figures; or, with `like: NAME` of a shipped cluster beside it, those that differ"""
    pcie: Pcie
    """likewise"""
    nvme: Nvme | None = None
    """absent: nothing can go to disk"""
    intra_node: NamedLink
    """a shipped link such as nvlink3, or all its figures"""
    inter_node: NamedNetwork | None = None
    """needed from two nodes on: a shipped one such as infiniband-hdr-8x200, or all its figures"""
    running: Running | None = None
    """price and power, for dollars and kWh; absent: not stated"""

    @model_validator(mode="after")
    def _check(self) -> NodeGroup:
        if self.nodes > 1 and self.inter_node is None:
            raise InputError(
                f"node group {self.name!r} has {self.nodes} nodes but no inter_node link; "
                "describe the network in `inter_node`, or name one, such as ethernet-10g, or use 1 "
                "node"
            )
        return self

    @property
    def gpus(self) -> int:
        """GPUs in the group."""
        return self.nodes * self.gpus_per_node

    def shared_by(self, ranks: int) -> NodeSharing:
        """The sharing of one node where `ranks` ranks run on the group, nodes filled in turn."""
        return NodeSharing(min(ranks, self.gpus_per_node))


class LikeGroup(Spec):
    """Nodes as a shipped cluster has them, but for the parts and figures that are given."""

    like: str = Field(max_length=LONGEST_NAME)
    """a shipped cluster of one group, such as dgx-h100"""
    name: str | None = Field(default=None, max_length=LONGEST_NAME)
    nodes: int = Field(default=1, gt=0, le=MOST_NODES)
    gpus_per_node: int | None = Field(default=None, gt=0, le=MOST_GPUS)
    gpu: Annotated[NamedGpu, Changeable()] | None = None
    host: Annotated[Host, Changeable()] | None = None
    pcie: Annotated[Pcie, Changeable()] | None = None
    nvme: Annotated[Nvme, Changeable()] | None = None
    """null: nothing can go to disk"""
    intra_node: Annotated[NamedLink, Changeable()] | None = None
    inter_node: Annotated[NamedNetwork, Changeable()] | None = None
    running: Annotated[Running, Changeable()] | None = None

    @model_validator(mode="before")
    @classmethod
    def _parts_changed(cls, data: Any) -> Any:
        """What is given of a part of the shipped group changes that part."""
        if not isinstance(data, Mapping) or not isinstance(data.get("like"), str):
            return data
        group = shipped.find(cluster_folder(), data["like"], Cluster, "cluster").group
        return {name: _changed(given, getattr(group, name, None)) for name, given in data.items()}

    def described(self) -> NodeGroup:
        """The group with all its figures. Raises InputError."""
        group = shipped.find(cluster_folder(), self.like, Cluster, "cluster").group
        given = {name: getattr(self, name) for name in self.model_fields_set - {"like"}}
        if empty := sorted(name for name in given.keys() & _NEEDED if given[name] is None):
            raise InputError(f"{', '.join(empty)}: a group needs it; leave it out for the usual")
        return NodeGroup.model_validate({**dict(group), "nodes": self.nodes, **given})


def _changed(given: Any, usual: Any) -> Any:
    """What is given of a part, a block without some of the keys it needs, with the usual rest."""
    if not isinstance(given, Mapping) or not isinstance(usual, MachinePart):
        return given
    needed = {name for name, field in type(usual).model_fields.items() if field.is_required()}
    return given if needed <= given.keys() else usual.changed(given)


_NEEDED = {name for name, field in NodeGroup.model_fields.items() if field.is_required()}


def cluster_folder() -> Path:
    """Inside the package when installed from a wheel, beside it in a checkout."""
    packaged = shipped.PACKAGE / "cluster_configs"
    return packaged if packaged.is_dir() else shipped.PACKAGE.parent / "cluster_configs"


def _way(value: object) -> str:
    """How a group is written: the tag of its kind in _EITHER."""
    like = "like" in value if isinstance(value, Mapping) else isinstance(value, LikeGroup)
    return "as shipped" if like else "in full"


_EITHER = Annotated[
    Annotated[NodeGroup, Tag("in full")] | Annotated[LikeGroup, Tag("as shipped")],
    Discriminator(_way),
    AfterValidator(lambda group: group.described() if isinstance(group, LikeGroup) else group),
]
# A group that may be written as one like a shipped cluster's.
AnyGroup = Annotated[
    NodeGroup, GetPydanticSchema(lambda _, handler: handler.generate_schema(_EITHER))
]


class Member(Spec):
    """A group of a mixed cluster, as a plan for equal nodes names it."""

    name: str = Field(max_length=LONGEST_NAME)
    nodes: int = Field(gt=0, le=MOST_NODES)
    gpus: int = Field(gt=0, le=MOST_GPUS)
    """of a node, in use or not"""
    gpu: str = Field(max_length=LONGEST_NAME)
    figures: NodeGroup | None = Field(default=None, exclude_if=lambda group: group is None)
    """its own figures, where its ranks have micro-batches of a size of their own; absent: its nodes
    count as the plan's equal ones"""


class Cluster(Spec):
    """All the machines a plan may use."""

    name: str = Field(max_length=LONGEST_NAME)
    description: str = ""
    node_groups: tuple[AnyGroup, ...] = Field(min_length=1)
    """nodes of one kind in each; `like: dgx-h100` stands for a shipped cluster's figures"""
    members: tuple[Member, ...] | None = None
    """in a plan for a mixed cluster: the groups whose nodes it takes as equal ones"""
    left_out: tuple[Member, ...] | None = None
    """in such a plan: the groups that it leaves idle"""

    def implausible(self) -> Iterator[tuple[KeyPath, str]]:
        """Figures that no machine has, each with its place."""
        for index, group in enumerate(self.node_groups):
            for name, block in group:
                if isinstance(block, MachinePart):
                    for path, text in left_out_units(block):
                        yield ("node_groups", index, name, *path), text
            held, memory = group.gpu.context_memory, group.gpu.memory
            if held >= memory:
                told = f"is {format_bytes(held)}, which leaves nothing of the GPU's "
                yield ("node_groups", index, "gpu", "context_memory"), told + format_bytes(memory)

    @property
    def gpus(self) -> int:
        """GPUs in the whole cluster."""
        return sum(group.gpus for group in self.node_groups)

    @property
    def nodes(self) -> int:
        """Nodes in the whole cluster."""
        return sum(group.nodes for group in self.node_groups)

    @property
    def group(self) -> NodeGroup:
        """The only node group. Raises RefusedError where there are several."""
        if len(self.node_groups) > 1:
            names = ", ".join(group.name for group in self.node_groups)
            raise RefusedError(
                f"cluster {self.name!r} mixes node groups ({names}), and this asks for equal "
                "nodes; describe one of the groups as a cluster of its own"
            )
        return self.node_groups[0]

    def with_nodes(self, nodes: int) -> Cluster:
        """This cluster with another number of equal nodes. Raises InputError, RefusedError."""
        if not 1 <= nodes <= MOST_NODES:
            raise InputError(
                f"nodes is {quoted(nodes)}; a cluster has at least 1 and at most {MOST_NODES}"
            )
        if len(self.node_groups) > 1:
            names = " and ".join(group.name for group in self.node_groups)
            raise RefusedError(
                f"nodes {nodes}: cluster {self.name!r} has groups of unlike nodes ({names}); "
                "change `nodes` of the groups in its file"
            )
        group = self.group
        if nodes == group.nodes:
            return self
        if nodes > 1 and group.inter_node is None:
            raise InputError(
                f"cluster {self.name!r} describes no network between nodes, so {nodes} nodes "
                "cannot be planned; add `inter_node` to its node group, or use 1 node"
            )
        # Which of unlike nodes they are is not known then, so all count as the worst.
        alike = tuple(m.model_copy(update={"figures": None}) for m in self.members or ())
        groups = (group.model_copy(update={"nodes": nodes}),)
        return self.model_copy(update={"node_groups": groups, "members": alike or None})

    def with_caps(
        self, gpu: int | None = None, host: int | None = None, nvme: int | None = None
    ) -> Cluster:
        """This cluster with less memory: bytes per GPU, and per node for host and nvme.

        A cap above what a tier has changes nothing; nvme=0 takes the drives away. The host's cap is
        for tensors alone, so what processes take does not count. Raises InputError where nothing
        would be left.
        """
        for name, limit in (("gpu", gpu), ("host", host)):
            if limit is not None and limit <= 0:
                raise InputError(f"cap {name} is {limit}; write a size such as {name}=16GiB")
        groups = tuple(
            group.model_copy(
                update={
                    "gpu": group.gpu.limited("memory", gpu),
                    "host": _capped_host(group.host, host),
                    "nvme": _capped_drives(group.nvme, nvme),
                }
            )
            for group in self.node_groups
        )
        return self.model_copy(update={"node_groups": groups})


def _capped_host(host: Host, limit: int | None) -> Host:
    if limit is None or limit >= (host.tensor_memory or host.memory):
        return host
    told = f"capped on request (of {format_bytes(host.memory)})"
    return host.replaced({"tensor_memory": limit}, {"tensor_memory": told})


def _capped_drives(drives: Nvme | None, limit: int | None) -> Nvme | None:
    if drives is None or limit is None:
        return drives
    per_drive = limit // drives.drives
    if per_drive <= 0:
        return None
    limited: Nvme = drives.limited("capacity", per_drive)
    return limited
