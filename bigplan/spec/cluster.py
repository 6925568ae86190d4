"""Hardware as data: capacities, rates and efficiency curves, each with its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from bigplan.errors import InputError, RefusedError, quoted
from bigplan.spec.files import shipped
from bigplan.spec.files.document import LONGEST_NAME, Spec
from bigplan.spec.files.problems import KeyPath
from bigplan.spec.part import MachinePart, left_out_units
from bigplan.units import Bandwidth, Bytes, PositiveFlops, Power, Price, Rate, Seconds, format_bytes

# Attention kernels: FlashAttention's three versions, cuDNN's (which Transformer Engine uses), and
# torch's scaled_dot_product_attention where it is none of these.
FlashKernel = Literal["flash1", "flash2", "flash3", "cudnn", "sdpa"]
Peaked = Literal["bf16", "fp16", "fp32", "tf32", "fp8"]
MOST_NODES = 10**5  # with eight GPUs each, as many GPUs as the largest clusters have
Traffic = Literal["all_reduce", "reduce_scatter", "all_gather", "send"]  # what a link carries
Fraction = Annotated[float, Field(gt=0, le=1)]
PartReached = Annotated[float, Field(gt=0)]  # share of a nominal peak; CPU devices exceed theirs
HalfLength = Annotated[float, Field(ge=0)]  # tokens


class Gpu(MachinePart):
    """One device that computes."""

    name: str = Field(max_length=LONGEST_NAME)
    device: Literal["cuda", "rocm", "cpu"]
    """cuda; rocm for AMD's, which are planned for and never ran; or cpu for a part of the host's
    cores and memory that stands in for a GPU"""
    memory: Bytes = Field(gt=0)
    """usable device memory, such as 80 GiB"""
    multiprocessors: int = Field(gt=0, le=10**5)
    """streaming multiprocessors (cores, on a CPU): a GEMM's tiles fill them in waves"""
    peak_flops: dict[Peaked, PositiveFlops] = Field(min_length=1)
    """dense peak of each precision, such as {bf16: 989 TFLOP/s}"""
    memory_bandwidth: Bandwidth = Field(gt=0)
    """nominal, such as 3.35 TB/s"""
    gemm_efficiency: float = Field(gt=0, le=1)
    """fraction of the peak that a large GEMM reaches"""
    gemm_half_k: float = Field(ge=0)
    """inner dimension K0 in the factor K / (K + K0) of a GEMM's efficiency"""
    gemm_efficiencies: dict[Peaked, PartReached] | None = None
    """where a precision reaches another fraction of its peak; absent: gemm_efficiency for all"""
    memory_efficiency: float = Field(gt=0, le=1)
    """fraction of the nominal memory bandwidth that streaming kernels reach"""
    attention_forward_efficiency: dict[FlashKernel, PartReached] = Field(min_length=1)
    """by implementation of flash attention: fraction of the 16-bit peak (causal FLOPs counted)"""
    attention_backward_efficiency: dict[FlashKernel, PartReached] = Field(min_length=1)
    """by implementation: fraction of the 16-bit peak (2.5 x the forward's FLOPs)"""
    attention_forward_half_length: dict[FlashKernel, HalfLength] | None = None
    """by implementation: tokens h in the factor s / (s + h) of its efficiency; absent: h is 0"""
    attention_backward_half_length: dict[FlashKernel, HalfLength] | None = None
    """by implementation: the same of the backward"""
    launch_overhead: Seconds = Field(ge=0)
    """time per kernel that no work hides, such as 4 us"""
    operator_overhead: Seconds = Field(default=75e-6, ge=0)
    """host time of an operator of a layer in the native runtime: Python, autograd, a launch"""
    kernel_overhead: Seconds = Field(default=100e-6, ge=0)
    """host time that an operator takes besides where it is a fused kernel, launched from Python"""
    action_overhead: Seconds = Field(default=60e-6, ge=0)
    """host time of an action of the native runtime besides its operators"""
    context_memory: Bytes = Field(ge=0)
    """device memory held by the context and libraries"""
    communicator_memory: Bytes = Field(default=688 << 20, ge=0)
    """device memory of a communicator between GPUs; the default is NCCL's between four A100s with
    NVLink (https://github.com/NVIDIA/nccl/issues/964)"""
    adam_rate: Rate = Field(gt=0)
    """parameters per second of a fused fp32 AdamW on the device, such as 90 G/s"""
    spread: float = Field(default=0.016, ge=0, le=0.2)
    """standard deviation of the speed of GPUs of a type, all wait for the slowest; the default is
    from ranges of 8% over clusters of thousands (arXiv 2208.11035) and of 5% among the eight of a
    node (stas00/ml-engineering, compute/accelerator)"""

    @model_validator(mode="after")
    def _half_lengths_have_an_efficiency(self) -> Gpu:
        for way in ("forward", "backward"):
            known = getattr(self, f"attention_{way}_efficiency")
            stray = [
                k for k in getattr(self, f"attention_{way}_half_length") or {} if k not in known
            ]
            if stray:
                raise InputError(
                    f"attention_{way}_half_length names {', '.join(stray)}, for which "
                    f"attention_{way}_efficiency has no value; state it there or leave it out here"
                )
        return self

    def gemm_share(self, precision: str) -> float:
        """Fraction of the precision's peak that a large GEMM reaches."""
        shares: dict[str, float] = {
            str(name): s for name, s in (self.gemm_efficiencies or {}).items()
        }
        return shares.get(precision, self.gemm_efficiency)

    @property
    def runs_kernels(self) -> bool:
        """Whether fused kernels run on the device and copies run beside them; not so on CPUs."""
        return self.device != "cpu"

    def slowest(self, gpus: int) -> float:
        """Seconds of the slowest of `gpus` GPUs in units of the usual one's.

        The largest of n normal values is expected where (n - 3/8) / (n + 1/4) of all are smaller
        (Blom 1958). Parts of one CPU do not differ.
        """
        if self.device == "cpu":
            return 1.0
        return 1.0 + self.spread * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP/s. Raises InputError where the device has no such precision."""
        rates: dict[str, float] = {str(name): rate for name, rate in self.peak_flops.items()}
        if precision not in rates:
            others = ", ".join(name for name in rates if name != "fp8")
            remedy = "leave fp8_gemms off" if precision == "fp8" else f"use precision {others}"
            raise InputError(
                f"{self.name} states no peak for {precision}; {remedy}, "
                f"or add {precision} to its peak_flops if it has it"
            )
        return rates[precision]


class Host(MachinePart):
    """The CPU side of one node."""

    memory: Bytes = Field(gt=0)
    """memory that training may use, tensors and processes together, such as 120 GiB"""
    tensor_memory: Bytes | None = Field(default=None, gt=0)
    """of it, what a plan may place there at most; absent: all that processes leave"""
    memory_bandwidth: Bandwidth = Field(gt=0)
    """achieved DRAM bandwidth, reads and writes together"""
    cores: int = Field(gt=0, le=10**5)
    adam_rate: Rate = Field(gt=0)
    """parameters per second of fp32 AdamW with all the node's cores, such as 4 G/s"""
    adam_rate_beside_copies: Rate | None = Field(default=None, gt=0)
    """the same while all the node's GPUs copy both ways: what plans count on where it is known"""
    numa_domains: int = Field(default=1, gt=0, le=10**5)
    """parts that memory_bandwidth divides into: a process that binds nothing gets one's share"""


class Pcie(MachinePart):
    """Copies between pinned host memory and GPU memory."""

    host_to_device: Bandwidth = Field(gt=0)
    """per GPU, when it copies alone, such as 55 GB/s"""
    device_to_host: Bandwidth = Field(gt=0)
    """per GPU, when it copies alone"""
    node_host_to_device: Bandwidth = Field(gt=0)
    """all the node's GPUs together"""
    node_device_to_host: Bandwidth = Field(gt=0)
    """all the node's GPUs together"""
    latency: Seconds = Field(ge=0)
    """per copy, such as 10 us"""
    both_ways: Bandwidth | None = Field(default=None, gt=0)
    """per GPU, both directions added up while it copies both ways; not used in plans"""
    node_both_ways: Bandwidth | None = Field(default=None, gt=0)
    """the same for all the node's GPUs together; not used in plans"""
    node_host_to_device_beside_update: Bandwidth | None = Field(default=None, gt=0)
    """all the node's GPUs, chunk after chunk, while the others leave and the CPU runs AdamW: what
    optimizer state comes to the GPU at"""
    node_device_to_host_beside_update: Bandwidth | None = Field(default=None, gt=0)
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
    def node_read(self) -> float:
        """Bytes/s from all drives of the node."""
        return self.read * self.drives

    @property
    def node_write(self) -> float:
        """Bytes/s to all drives of the node."""
        return self.write * self.drives


class Link(MachinePart):
    """What connects the GPUs of a node, or nodes."""

    name: str = Field(max_length=LONGEST_NAME)
    bandwidth: Bandwidth = Field(gt=0)
    """bus bandwidth reached by large messages: per GPU inside a node, per node between nodes"""
    latency: Seconds = Field(ge=0)
    """per step of a collective (n - 1 steps around a ring of n) or per point-to-point message"""
    half_size: Bytes = Field(ge=0)
    """message size at which half the bandwidth is reached, such as 27 MB"""
    reduce_scatter_bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """bus bandwidth of reduce-scatters; absent: as `bandwidth`, which is that of all-reduces"""
    all_gather_bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """bus bandwidth of all-gathers; absent: as `bandwidth`"""
    send_bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """of messages from one GPU to another; absent: as `bandwidth`"""
    beside_compute: Fraction | None = None
    """of their speed, what collectives keep while all GPUs compute; absent: all"""
    compute_beside: Fraction | None = None
    """of its speed, what compute keeps while collectives run; absent: all"""
    beside_copies: Fraction | None = None
    """of their speed, what collectives keep while all GPUs copy both ways; not used in plans"""

    mesh: int | None = Field(default=None, ge=2, le=1024)
    """GPUs that are wired in pairs without a switch; absent: a switch or a bus connects them"""

    def among(self, ranks: int) -> Link:
        """The link as a group of `ranks` GPUs has it.

        Without a switch, a group has only the wires between its own GPUs: (n - 1) / (mesh - 1) of
        all.
        """
        if self.mesh is None or not 1 < ranks < self.mesh:
            return self
        share = (ranks - 1) / (self.mesh - 1)
        rates = ("bandwidth", "reduce_scatter_bandwidth", "all_gather_bandwidth", "send_bandwidth")
        known = {name: getattr(self, name) for name in rates}
        return self.model_copy(update={n: share * r for n, r in known.items() if r is not None})

    def reached(self, traffic: Traffic) -> float:
        """Bytes/s of large messages of this kind of traffic."""
        own: dict[Traffic, float | None] = {
            "all_reduce": self.bandwidth,
            "reduce_scatter": self.reduce_scatter_bandwidth,
            "all_gather": self.all_gather_bandwidth,
            "send": self.send_bandwidth,
        }
        return own[traffic] or self.bandwidth


_GPUS = shipped.PACKAGE / "hardware"
_LINKS = _GPUS / "links"


def list_gpus() -> tuple[str, ...]:
    """Names of the shipped GPU types, sorted."""
    return shipped.names(_GPUS)


def find_gpu(name: str) -> Gpu:
    """A shipped GPU type. Raises InputError."""
    return shipped.find(_GPUS, name, Gpu, "GPU type")


def list_links() -> tuple[str, ...]:
    """Names of the shipped links, sorted."""
    return shipped.names(_LINKS)


def find_link(name: str) -> Link:
    """A shipped link inside or between nodes. Raises InputError."""
    return shipped.find(_LINKS, name, Link, "link")


def _or_name(
    part: type[MachinePart], find: Callable[[str], MachinePart], known: Callable[[], Sequence[str]]
) -> BeforeValidator:
    """A validator: where such a part is expected, text is the name of a shipped one."""
    name = Field(json_schema_extra=lambda schema: schema.update(enum=[*known()]))
    return BeforeValidator(
        lambda value: find(value) if isinstance(value, str) else value,
        json_schema_input_type=part | Annotated[str, name],
    )


NamedGpu = Annotated[Gpu, _or_name(Gpu, find_gpu, list_gpus)]
NamedLink = Annotated[Link, _or_name(Link, find_link, list_links)]


class Running(MachinePart):
    """What running processes take of a node, besides tensors."""

    price: Price | None = Field(default=None, gt=0)
    """of a node, such as 55.04 USD/h"""
    power: Power | None = Field(default=None, gt=0)
    """of a node, such as 10.2 kW; the source says whether it is the node's or its GPUs' alone"""


class NodeGroup(Spec):
    """Equal nodes. A GPU or link may be written as a shipped name."""

    name: str = Field(max_length=LONGEST_NAME)
    nodes: int = Field(default=1, gt=0, le=MOST_NODES)
    gpus_per_node: int = Field(gt=0, le=1024)
    gpu: NamedGpu
    """a shipped type such as a100-sxm4-80gb, or all its figures"""
    host: Host
    pcie: Pcie
    nvme: Nvme | None = None
    """absent: nothing can go to disk"""
    intra_node: NamedLink
    """a shipped link such as nvlink3, or all its figures"""
    inter_node: NamedLink | None = None
    """needed from two nodes on: a shipped link such as infiniband-hdr-8x200, or all its figures"""
    running: Running | None = None
    """price and power, for dollars and kWh; absent: not stated"""

    @model_validator(mode="after")
    def _check(self) -> NodeGroup:
        if self.nodes > 1 and self.inter_node is None:
            raise InputError(
                f"node group {self.name!r} has {self.nodes} nodes but no inter_node link; "
                "describe the network in `inter_node`, or use 1 node"
            )
        return self

    @property
    def gpus(self) -> int:
        """GPUs in the group."""
        return self.nodes * self.gpus_per_node


class Cluster(Spec):
    """All the machines a plan may use."""

    name: str = Field(max_length=LONGEST_NAME)
    description: str = ""
    node_groups: tuple[NodeGroup, ...] = Field(min_length=1)

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
                f"cluster {self.name!r} mixes node groups ({names}), which cannot be planned "
                "yet; describe each group as a cluster of its own"
            )
        return self.node_groups[0]

    def with_nodes(self, nodes: int) -> Cluster:
        """This cluster with another number of equal nodes. Raises InputError, RefusedError."""
        if not 1 <= nodes <= MOST_NODES:
            raise InputError(
                f"nodes is {quoted(nodes)}; a cluster has at least 1 and at most {MOST_NODES}"
            )
        group = self.group
        if nodes > 1 and group.inter_node is None:
            raise InputError(
                f"cluster {self.name!r} describes no network between nodes, so {nodes} nodes "
                "cannot be planned; add `inter_node` to its node group, or use 1 node"
            )
        return self.model_copy(update={"node_groups": (group.model_copy(update={"nodes": nodes}),)})

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
