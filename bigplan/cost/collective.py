"""Seconds of collectives and of pipeline messages: ring algorithms on links with a size curve."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from bigplan.graph.strategy import Strategy
from bigplan.spec.cluster import Link, NodeGroup


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator: `size` ranks, `per_node` of them on each node."""

    size: int
    per_node: int
    intra: Link
    inter: Link | None
    inter_share: float  # fraction of a node's network that this group uses

    @property
    def crosses_nodes(self) -> bool:
        """Whether the ranks are on several nodes."""
        return self.size > self.per_node


def tensor_group(strategy: Strategy, nodes: NodeGroup) -> Group:
    """Tensor-parallel ranks: neighbours within a node."""
    return Group(strategy.tp, strategy.tp, nodes.intra_node, None, 1.0)


def data_group(strategy: Strategy, nodes: NodeGroup) -> Group:
    """Data-parallel ranks: every tp-th rank, pipeline stages outermost."""
    per_node = max(1, min(strategy.dp, nodes.gpus_per_node // strategy.tp))
    share = per_node / nodes.gpus_per_node
    return Group(strategy.dp, per_node, nodes.intra_node, nodes.inter_node, share)


def all_reduce(nbytes: int, group: Group) -> float:
    """Ring all-reduce: every rank sends 2 (n - 1) / n of the message."""
    return 2 * reduce_scatter(nbytes, group)


def reduce_scatter(nbytes: int, group: Group) -> float:
    """Ring reduce-scatter or all-gather of a message of `nbytes` in whole.

    A ring over several nodes is as slow as its slowest link; `n - 1` steps of latency inside a
    node, a tree's log2 across nodes.
    """
    if group.size == 1:
        return 0.0
    sent = nbytes * (group.size - 1) / group.size
    steps = min(group.size, group.per_node) - 1
    seconds = sent / _rate(nbytes, group.intra, 1.0) + steps * group.intra.latency
    if group.crosses_nodes:
        assert group.inter is not None, "a cluster of several nodes describes its network"
        hops = log2(group.size / group.per_node) + 1
        across = sent / _rate(nbytes, group.inter, group.inter_share) + hops * group.inter.latency
        seconds = max(seconds, across)
    return seconds


def send(nbytes: int, strategy: Strategy, nodes: NodeGroup) -> float:
    """A hidden state to the next pipeline stage: each tensor-parallel rank sends its share."""
    if strategy.pp == 1:
        return 0.0
    share = nbytes // strategy.tp
    if strategy.dp * strategy.tp < nodes.gpus_per_node or nodes.inter_node is None:
        return share / _rate(share, nodes.intra_node, 1.0) + nodes.intra_node.latency
    network = nodes.inter_node
    return share / _rate(share, network, 1.0 / nodes.gpus_per_node) + network.latency


def _rate(nbytes: int, link: Link, share: float) -> float:
    """Bytes/s of a message: half the bandwidth at `half_size`, all of it far above."""
    return link.bandwidth * share * nbytes / (nbytes + link.half_size)
