"""Seconds of collectives and of pipeline messages: ring algorithms on links with a size curve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import comb, log2
from typing import NamedTuple

from bigplan.cost.framework import Framework
from bigplan.graph.operators import Collective, Pattern
from bigplan.graph.strategy import Strategy
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.link import GpuLink, Network, Traffic
from bigplan.spec.sharing import NodeSharing


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator: `size` ranks, `per_node` of them on each node."""

    size: int
    per_node: int
    intra: GpuLink
    inter: Network | None
    inter_share: float  # fraction of a node's network that this group uses

    @property
    def crosses_nodes(self) -> bool:
        """Whether the ranks are on several nodes."""
        return self.size > self.per_node

    @property
    def by_copy_engines(self) -> bool:
        """Whether the native runtime's gathers run no kernel (runtime/parallel/copy_engines)."""
        return not self.crosses_nodes and self.intra.peer_access

    @property
    def slowest(self) -> GpuLink | Network:
        """The link between nodes where the ranks are on several, else that inside one."""
        return self.inter if self.crosses_nodes and self.inter else self.intra


def tensor_group(strategy: Strategy, nodes: NodeGroup) -> Group:
    """Tensor-parallel ranks: neighbours within a node, and whole nodes beyond that."""
    per_node = min(strategy.tp, nodes.gpus_per_node)
    intra = nodes.intra_node.among(per_node)
    return Group(strategy.tp, per_node, intra, nodes.inter_node, 1.0)


def data_group(strategy: Strategy, nodes: NodeGroup) -> Group:
    """Ranks that share states: every tp-th rank, pipeline stages outermost."""
    return _every_tensor_place(strategy.shards, strategy, nodes)


def shard_group(strategy: Strategy, nodes: NodeGroup) -> Group:
    """Ranks that share one copy of states out: neighbours among those that have the same ones."""
    return _every_tensor_place(strategy.zero_group or strategy.shards, strategy, nodes)


def replica_group(strategy: Strategy, nodes: NodeGroup) -> Group:
    """Ranks with the same part of their zero groups' copies: every zero_group-th of a stage.

    Where a zero group fills its nodes each has one rank on a node, and all rings of the node's
    ranks share its network.
    """
    apart = strategy.tp * (strategy.zero_group or strategy.shards)
    per_node = max(1, min(strategy.zero_copies, nodes.gpus_per_node // apart))
    share = per_node / nodes.gpus_per_node
    intra = nodes.intra_node.among(per_node)
    return Group(strategy.zero_copies, per_node, intra, nodes.inter_node, share)


def context_group(strategy: Strategy, nodes: NodeGroup) -> Group:
    """Context-parallel ranks: neighbours among those that share states."""
    return _every_tensor_place(strategy.cp, strategy, nodes)


def _every_tensor_place(size: int, strategy: Strategy, nodes: NodeGroup) -> Group:
    """So many ranks, each the next with the same tensor-parallel place."""
    return _apart(size, strategy.tp, nodes)


def _apart(size: int, distance: int, nodes: NodeGroup) -> Group:
    """So many ranks, each the next but so many of a pipeline stage."""
    per_node = max(1, min(size, nodes.gpus_per_node // distance))
    share = per_node / nodes.gpus_per_node
    intra = nodes.intra_node.among(per_node)
    return Group(size, per_node, intra, nodes.inter_node, share)


def expert_group(strategy: Strategy, nodes: NodeGroup, *, folded: bool = False) -> Group:
    """Ranks that have all experts together: neighbours among those that share states.

    `folded`: among all of a pipeline stage, as in `Strategy.expert_shards`.
    """
    return _apart(strategy.ep, 1 if folded else strategy.tp, nodes)


def expert_data_group(strategy: Strategy, nodes: NodeGroup, *, folded: bool = False) -> Group:
    """Ranks that share out the same experts: every ep-th of a zero group, or of a stage."""
    distance = strategy.ep * (1 if folded else strategy.tp)
    return _apart(strategy.expert_shards(folded=folded), distance, nodes)


class LayerGroups(NamedTuple):
    """The groups whose ranks exchange something within layers."""

    tensor: Group
    context: Group
    experts: Group

    @classmethod
    def of(cls, strategy: Strategy, nodes: NodeGroup, *, folded: bool = False) -> LayerGroups:
        """Those of a strategy's ranks; `folded` as in `expert_group`."""
        return cls(
            tensor_group(strategy, nodes),
            context_group(strategy, nodes),
            expert_group(strategy, nodes, folded=folded),
        )

    @property
    def alone(self) -> bool:
        """Whether a rank exchanges nothing within a layer."""
        return self.tensor.size == self.context.size == self.experts.size == 1

    def seconds(self, collective: Collective) -> float:
        """Seconds of a collective of its group, other than rows of experts."""
        of_context = collective.pattern == "all_to_all"
        return collective_seconds(collective, self.context if of_context else self.tensor)


def collective_seconds(collective: Collective, group: Group) -> float:
    """Seconds of a collective within a layer."""
    once = PATTERNS[collective.pattern]
    return collective.count * once(collective.nbytes, group)


def exposed_seconds(
    collective: Collective,
    groups: LayerGroups,
    framework: Framework,
    gemms: Mapping[str, float],
    *,
    beside: bool = True,
) -> float:
    """Seconds that a rank waits for a collective within a layer.

    `gemms`: seconds of the pass's products by name. If the framework runs the collective beside a
    product, the product hides as many seconds as it takes itself. Without `beside` nothing hides a
    collective: those of CPU devices have ended when their call returns.
    """
    if collective.hidden and beside:
        return 0.0
    seconds = groups.seconds(collective)
    if framework.beside_weights:
        seconds = max(0.0, seconds - gemms.get(collective.beside, 0.0))
    return seconds if collective.exposed else framework.tensor_exposed * seconds


def dispatched_seconds(
    collectives: Iterable[Collective],
    groups: LayerGroups,
    framework: Framework,
    compute: float,
    multiprocessors: int,
) -> float:
    """Seconds that a rank waits for rows of experts in a pass with so many of compute.

    Beside the compute of another micro-batch, which takes as long, a part of them is hidden, as far
    as that reaches. Their kernels then take multiprocessors from it.
    """
    once = framework.dispatches_once
    rows = (one for one in collectives if one.rows)
    sent = sum(dispatch(one, groups.experts, once=once) for one in rows)
    if not framework.dispatches_beside:
        return sent
    hidden = min(framework.dispatch_hidden * sent, compute)
    taken = min(1.0, DISPATCH_MULTIPROCESSORS / multiprocessors)
    return sent - hidden + taken * hidden


# Multiprocessors of kernels that exchange rows: Megatron-Bridge sets `moe_hybridep_num_sms` so
# (scripts/performance/utils/overrides.py).
DISPATCH_MULTIPROCESSORS = 32
# Of what kernels that send a token once to each rank forward inside a node, the part that does not
# hide behind the network. HybridEP's kernels among 16, 32 and 64 H100s reach 67, 58 and 50 GB/s of
# tokens times nodes (its README, hidden states of 7,168 in bf16, 16 multiprocessors, mean of
# dispatch and combine); this gives 67, 55 and 50.
FORWARDED = 0.55


def all_reduce(nbytes: int, group: Group) -> float:
    """All-reduce: a ring, in which every rank sends 2 (n - 1) / n of the message, or a tree.

    Both move the same bytes; a tree has fewer steps, so its latency is that of 2 log2 n of them.
    """
    if group.size == 1 or not nbytes:  # a tied head whose norm has no weights
        return 0.0
    tree = 2 * log2(group.size) * group.slowest.latency
    moved = 2 * _transfer(nbytes, group, "all_reduce")
    return moved + min(tree, 2 * _ring_latency(group))


def reduce_scatter(nbytes: int, group: Group) -> float:
    """Ring reduce-scatter of a message of `nbytes` in whole."""
    return _once_around(nbytes, group, "reduce_scatter")


def all_gather(nbytes: int, group: Group) -> float:
    """Ring all-gather of a message of `nbytes` in whole."""
    return _once_around(nbytes, group, "all_gather")


def all_to_all(nbytes: int, group: Group) -> float:
    """A rank's `nbytes`, an equal part to each rank: messages to all others, as sends."""
    return _once_around(nbytes, group, "send")


def dispatch(sent: Collective, group: Group, *, once: bool) -> float:
    """A rank's bytes, some rows of each token, to the ranks of their experts.

    Every rank sends each other one as much. Of n ranks, m of them on each node, (m - 1) / n of the
    bytes go to other ranks of the node, and (n - m) / n leave it, those of all m ranks over its
    network. With `once` a token goes once to each node that has any of its experts, and from there
    once to each such rank (the kernels of DeepEP and HybridEP), all at once in place of a ring.
    """
    if group.size == 1:
        return 0.0
    nbytes, ranks, nodes = sent.nbytes, group.size, -(-group.size // group.per_node)
    inside, leaving = (group.per_node - 1) / ranks, (ranks - group.per_node) / ranks
    if once:
        inside = _reached(ranks, sent) * (group.per_node - 1) / group.per_node
        leaving = _reached(nodes, sent) * (nodes - 1) / nodes
    seconds = inside * nbytes / _sized(group.intra.reached("send"), nbytes, group.intra)
    if group.crosses_nodes:
        assert group.inter is not None, "a cluster of several nodes describes its network"
        rate = group.inter_share * group.inter.reached("send") / group.per_node
        across = leaving * nbytes / _sized(rate, nbytes, group.inter)
        seconds = across + FORWARDED * seconds if once else max(seconds, across)
    return seconds + (group.slowest.latency if once else _ring_latency(group))


def _reached(places: int, sent: Collective) -> float:
    """Of a token's rows, the part of as many places that has any of them, expected of experts.

    k rows are anywhere: p (1 - (1 - 1 / p)^k) of p places. A token that has g of G groups of
    experts has its rows in those: of G / p groups at a place, j are the token's by chance.
    """
    rows, (groups, chosen) = sent.rows, sent.groups
    if places % groups == 0:  # each group has places of its own
        own = places // groups
        return float(chosen * own * (1 - (1 - 1 / own) ** (rows / chosen)) / rows)
    if groups % places:
        return places * (1 - (1 - 1 / places) ** rows) / rows
    here = groups // places
    missed = sum(
        comb(here, j) * comb(groups - here, chosen - j) * (1 - j / chosen) ** rows
        for j in range(min(here, chosen) + 1)
    )
    return float(places * (1 - missed / comb(groups, chosen)) / rows)


PATTERNS: Mapping[Pattern | Traffic, Callable[[int, Group], float]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
}


def beside_compute(seconds: float, group: Group) -> float:
    """A collective's seconds while the GPUs compute."""
    return seconds / (group.slowest.beside_compute or 1.0)


def taken_from_compute(seconds: float, group: Group, kept: float | None) -> float:
    """Seconds that compute takes longer beside so many of a collective.

    `kept`: of its speed, by the GPU's description; None: what the link's says.
    """
    return seconds * (1.0 - (kept or group.slowest.compute_beside or 1.0))


def _once_around(nbytes: int, group: Group, traffic: Traffic) -> float:
    if group.size == 1 or not nbytes:
        return 0.0
    return _transfer(nbytes, group, traffic) + _ring_latency(group)


def _transfer(nbytes: int, group: Group, traffic: Traffic) -> float:
    """Seconds of a ring's bytes, at the rate of its slowest link."""
    sent = nbytes * (group.size - 1) / group.size
    seconds = sent / _sized(group.intra.reached(traffic), nbytes, group.intra)
    if group.crosses_nodes:
        assert group.inter is not None, "a cluster of several nodes describes its network"
        rate = group.inter_share * group.inter.reached(traffic)
        seconds = max(seconds, sent / _sized(rate, nbytes, group.inter))
    return seconds


def _ring_latency(group: Group) -> float:
    """Seconds in which a byte passes the n - 1 hops of a ring, most of them inside nodes."""
    nodes = -(-group.size // group.per_node)
    across = (nodes - 1) * group.inter.latency if group.inter and nodes > 1 else 0.0
    return (group.size - nodes) * group.intra.latency + across


def send(nbytes: int, strategy: Strategy, nodes: NodeGroup) -> float:
    """A hidden state to the next pipeline stage: each tensor-parallel rank sends its share.

    `nbytes` is what one rank holds; with sequence parallelism that is its share already.
    """
    if strategy.pp == 1:
        return 0.0
    return hop(nbytes if strategy.sequence_parallel else nbytes // strategy.tp, strategy, nodes)


def hop(nbytes: int, strategy: Strategy, nodes: NodeGroup) -> float:
    """So many bytes from each rank of a pipeline stage to one of another, by the stage that waits.

    Where a node has several stages, but not all, its last one sends forward to another node and
    back inside its own, the first one the other way round: the mean of both. A step goes at their
    pace: on 10 Gb/s 67 MB from each of eight GPUs take 0.49 s between nodes, and 0.2 ms inside one.
    """
    inside, network = message(nbytes, nodes.intra_node.among(2)), nodes.inter_node
    gpus, stage = nodes.gpus_per_node, strategy.shards * strategy.tp
    if strategy.ranks <= gpus or network is None:
        return inside
    several = 2 * stage <= gpus
    # Out of a node go its last stage's messages and, to a node before it, its first stage's.
    both_ways = strategy.ranks > 2 * gpus or strategy.vpp > 1
    senders = (1 + both_ways) * stage if several else gpus
    sharing = NodeSharing(network.parts(senders, gpus))
    rate = sharing.rate_of_rank(network.reached("send"))
    across = nbytes / _sized(rate, nbytes, network) + network.latency
    return (inside + across) / 2 if several else across


def message(nbytes: int, link: GpuLink) -> float:
    """Seconds of a message from one GPU to another of its node."""
    return nbytes / _sized(link.reached("send"), nbytes, link) + link.latency


def _sized(rate: float, nbytes: int, link: GpuLink | Network) -> float:
    """What a message reaches of a rate: half of it at `half_size`, all of it far above."""
    return rate * nbytes / (nbytes + link.half_size)
