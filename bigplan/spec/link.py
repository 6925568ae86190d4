"""Links inside a node and networks between nodes as data; some are shipped by name."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field

from bigplan.spec.files import shipped
from bigplan.spec.files.document import LONGEST_NAME
from bigplan.spec.part import MachinePart, or_name
from bigplan.units import Bytes, NodeBandwidth, RankBandwidth, Seconds

Traffic = Literal["all_reduce", "reduce_scatter", "all_gather", "send"]  # what a link carries
Fraction = Annotated[float, Field(gt=0, le=1)]
RATES = ("bandwidth", "reduce_scatter_bandwidth", "all_gather_bandwidth", "send_bandwidth")
R = TypeVar("R", bound=float)
_LINKS = shipped.PACKAGE / "hardware" / "links"
_NETWORKS = shipped.PACKAGE / "hardware" / "networks"


class Link(MachinePart, Generic[R]):
    """What GPUs exchange tensors through. `R` says whose its rates are: a GPU's or a node's."""

    name: str = Field(max_length=LONGEST_NAME)
    bandwidth: R = Field(gt=0)
    """bus bandwidth reached by large messages"""
    latency: Seconds = Field(ge=0)
    """per step of a collective (n - 1 steps around a ring of n) or per point-to-point message"""
    half_size: Bytes = Field(ge=0)
    """message size at which half the bandwidth is reached, such as 27 MB"""
    reduce_scatter_bandwidth: R | None = Field(default=None, gt=0)
    """bus bandwidth of reduce-scatters; absent: as `bandwidth`, which is that of all-reduces"""
    all_gather_bandwidth: R | None = Field(default=None, gt=0)
    """bus bandwidth of all-gathers; absent: as `bandwidth`"""
    send_bandwidth: R | None = Field(default=None, gt=0)
    """of messages from one GPU to another; absent: as `bandwidth`"""
    beside_compute: Fraction | None = None
    """of their speed, what collectives keep while all GPUs compute; absent: all"""
    compute_beside: Fraction | None = None
    """of its speed, what compute keeps while collectives run; absent: all"""
    beside_copies: Fraction | None = None
    """of their speed, what collectives keep while all GPUs copy both ways; not used in plans"""

    def reached(self, traffic: Traffic) -> R:
        """Bytes/s of large messages of this kind of traffic."""
        own: dict[Traffic, R | None] = {
            "all_reduce": self.bandwidth,
            "reduce_scatter": self.reduce_scatter_bandwidth,
            "all_gather": self.all_gather_bandwidth,
            "send": self.send_bandwidth,
        }
        return own[traffic] or self.bandwidth


class GpuLink(Link[RankBandwidth]):
    """What connects the GPUs of a node; its rates are per GPU."""

    mesh: int | None = Field(default=None, ge=2, le=1024)
    """GPUs that are wired in pairs without a switch; absent: a switch or a bus connects them"""
    peer_access: bool = False
    """whether each GPU writes to the others' memory, so that copy engines can gather parameters"""

    def among(self, ranks: int) -> GpuLink:
        """The link as a group of `ranks` GPUs has it.

        Without a switch, a group has only the wires between its own GPUs: (n - 1) / (mesh - 1) of
        all.
        """
        if self.mesh is None or not 1 < ranks < self.mesh:
            return self
        share = (ranks - 1) / (self.mesh - 1)
        known = {name: getattr(self, name) for name in RATES}
        return self.model_copy(update={n: share * r for n, r in known.items() if r is not None})


class Network(Link[NodeBandwidth]):
    """What connects nodes; its rates are per node, which all GPUs of the node share."""

    mesh: None = None
    """always null: switches connect nodes"""
    nics: int | None = Field(default=None, gt=0, le=1024)
    """network cards of a node, such as 1; absent: as many as GPUs"""

    def parts(self, senders: int, gpus: int) -> int:
        """Of how many equal parts of a node's rate a GPU's message gets one.

        `senders` of the node's `gpus` send one each, and a message passes one card alone.
        """
        return max(senders, min(self.nics or gpus, gpus))


def list_links() -> tuple[str, ...]:
    """Names of the shipped links inside a node, sorted."""
    return shipped.names(_LINKS)


def list_networks() -> tuple[str, ...]:
    """Names of the shipped networks, sorted."""
    return shipped.names(_NETWORKS)


def find_link(name: str) -> GpuLink:
    """A shipped link inside a node. Raises InputError."""
    return shipped.find(_LINKS, name, GpuLink, "link inside a node")


def find_network(name: str) -> Network:
    """A shipped network between nodes. Raises InputError."""
    return shipped.find(_NETWORKS, name, Network, "network")


NamedLink = Annotated[GpuLink, or_name(GpuLink, find_link, list_links)]
NamedNetwork = Annotated[Network, or_name(Network, find_network, list_networks)]
