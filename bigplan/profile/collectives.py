"""Collectives and messages between this machine's devices: the figures of the link inside a node.

Every device has a process, as in training. Several sizes of messages and of groups are timed and
fitted to the formulas of `cost.collective`. All-reduces of a layer's size are timed again while all
devices compute and, on GPUs, while all copy. The figures are the shares of speed that then remain.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import NamedTuple, TypeVar

from bigplan.profile.bench import Bench, source
from bigplan.profile.budget import ReadClock, TimeBudget, median_seconds
from bigplan.profile.exchange import (
    Beside,
    Work,
    begin,
    copying,
    end,
    form_groups,
    multiplied,
    multiplying,
    rate_of_company,
    timed,
    timed_beside,
)
from bigplan.profile.fit import Exchange, Inside, fit_link
from bigplan.profile.peers import Peer, Peers, Together
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.link import GpuLink, Network, Traffic
from bigplan.units import format_bytes, format_seconds, rounded

KiB, MiB = 2**10, 2**20
L = TypeVar("L", GpuLink, Network)
TRAFFIC: tuple[Traffic, ...] = ("all_reduce", "reduce_scatter", "all_gather")
GPU_SIZES = (64 * KiB, 2 * MiB, 32 * MiB, 256 * MiB)
CPU_SIZES = (16 * KiB, 256 * KiB, 2 * MiB, 8 * MiB)
# Bytes of a layer's gradients, which are reduced while the layer before it is computed.
GPU_LAYER, CPU_LAYER = 256 * MiB, 2 * MiB
MOST_PROCESSES = 8  # for CPU devices; every GPU has one
SHARE_BESIDE = 1 / 3  # of the time, for exchanges beside compute and copies
LEAST_SECONDS = 0.1  # of work beside exchanges: some tens of products
# Products that are queued at once. A GPU's queue takes some 1,000 launches: a host that waits for
# room in it would queue the exchanges too late.
FEW_QUEUED, MOST_QUEUED = 10, 500
TURNS = 2  # of products alone and beside exchanges, three times as long as the products together
LEAST_SHARE = 0.01  # of a speed: nothing stands still beside something else
BACKENDS = {"cuda": "NCCL", "cpu": "gloo"}


def start_peers(group: NodeGroup, bench: Bench) -> Peers:
    """A process for each device; of CPU devices, only for the first eight."""
    devices = bench.devices
    if not bench.cuda:
        devices = devices * min(group.gpus_per_node, MOST_PROCESSES)
    return Peers(devices, bench.threads)


def measure_collectives(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """Measure `intra_node`, where the node has several devices. Raises WorkerError."""
    if group.gpus_per_node == 1:
        return group
    if bench.peers is not None:
        return _measured(group, bench, bench.peers, seconds)
    with start_peers(group, bench) as peers:
        return _measured(group, bench, peers, seconds)


def _measured(group: NodeGroup, bench: Bench, peers: Peers, seconds: float) -> NodeGroup:
    sizes = group_sizes(len(peers))
    exchanges = list(_exchanges(sizes, _messages(bench)))
    asked = Exchanges(peers, sizes, exchanges, bench.cuda, bench.clock)
    link = measure_link(group.intra_node, asked, seconds)
    name = f"{BACKENDS[bench.device.type]} inside the node"
    return group.model_copy(update={"intra_node": link.model_copy(update={"name": name})})


class Exchanges(NamedTuple):
    """What a link is measured with: processes, sizes of their groups, and exchanges."""

    peers: Together
    sizes: Sequence[int]
    exchanges: Sequence[Exchange]
    cuda: bool
    clock: ReadClock
    inside: Inside | None = None  # the nodes that a network joins


def measure_link(link: L, asked: Exchanges, seconds: float) -> L:
    """The link with figures that were measured within about `seconds`. Raises WorkerError."""
    start, peers = asked.clock(), asked.peers
    peers.call(form_groups, tuple(asked.sizes))  # returns once all have started
    budget = TimeBudget(max(seconds / 2, seconds - (asked.clock() - start)), asked.clock)
    each = budget.left * (1 - SHARE_BESIDE) / len(asked.exchanges)
    found = [_seconds(one, asked, each) for one in asked.exchanges]
    fit = fit_link(asked.exchanges, found, asked.inside)
    rates = {kind: rounded(rate) for kind, rate in fit.bandwidths.items()}
    figures = {
        "bandwidth": rates.pop("all_reduce"),
        "latency": rounded(fit.latency),
        "half_size": float(round(fit.half_size)),
    } | {f"{kind}_bandwidth": rate for kind, rate in rates.items()}
    backend = BACKENDS["cuda" if asked.cuda else "cpu"]
    least, most = (pick(one.nbytes for one in asked.exchanges) for pick in (min, max))
    tried = f"groups of {', '.join(map(str, asked.sizes))}, {format_bytes(least)} to "
    how = f"{backend}, {tried}{format_bytes(most)}, met to {fit.error:.0%} in the mean"
    told = dict.fromkeys(figures, source(how))
    kept, how_kept = _kept(asked, budget)
    return link.replaced(figures | kept, told | how_kept)


def _kept(asked: Exchanges, budget: TimeBudget) -> tuple[dict[str, float], dict[str, str]]:
    """What exchanges and the work beside them keep of their speed, and how it was measured."""
    peers, backend = asked.peers, BACKENDS["cuda" if asked.cuda else "cpu"]
    layer = Exchange("all_reduce", len(peers), GPU_LAYER if asked.cuda else CPU_LAYER)
    size = format_bytes(layer.nbytes)
    found = _beside(layer, multiplying, peers, budget.left / (3 if asked.cuda else 1))
    figures = {"beside_compute": found.exchange, "compute_beside": found.work}
    told = dict.fromkeys(figures, source(f"{backend}, all-reduces of {size}, {found}"))
    if not asked.cuda:
        return figures, told
    gather = layer._replace(traffic="all_gather")
    found = _beside_products(gather, peers, budget.left / 2)
    figures["compute_beside"] = found.work
    alone, longer = map(format_seconds, (found.alone, rounded(found.alone / found.exchange)))
    told["compute_beside"] = source(
        f"{backend}, all-gathers of {size}, {alone} alone and {longer} beside products that were "
        "all queued at once"
    )
    found = _beside(layer, copying, peers, budget.left)
    figures["beside_copies"] = found.exchange
    told["beside_copies"] = source(f"{backend}, copies of 64 MiB both ways, {found}")
    return figures, told


def group_sizes(world: int) -> tuple[int, ...]:
    """Sizes of groups: powers of two from 2 on, and all `world` ranks."""
    return tuple(sorted({2**n for n in range(1, world.bit_length())} | {world}))


def _messages(bench: Bench) -> Sequence[int]:
    """Bytes, smallest first: sizes with room for them twice, and the two smallest in any case."""
    room = bench.device_memory() // 4
    sizes = GPU_SIZES if bench.cuda else CPU_SIZES
    return [nbytes for nbytes in sizes if nbytes <= max(room, sizes[1])]


def _exchanges(sizes: Sequence[int], messages: Sequence[int]) -> Iterator[Exchange]:
    """All kinds among all devices, all-reduces also in smaller groups, sends between two."""
    for nbytes in messages:
        yield from _collectives(sizes, nbytes)
        yield Exchange("send", 2, nbytes)


def _collectives(sizes: Sequence[int], nbytes: int) -> Iterator[Exchange]:
    for kind in TRAFFIC:
        yield Exchange(kind, sizes[-1], nbytes)
    for size in sizes[:-1]:
        yield Exchange("all_reduce", size, nbytes)


def across(peers: Together, group: NodeGroup, clock: ReadClock) -> Exchanges:
    """What the network between nodes is measured with; every device of every node has a process.

    Messages between two devices are not timed but taken to be as fast as collectives: one pair
    alone does not fill a network that all devices of a node share.
    """
    cuda, per_node = group.gpu.device == "cuda", group.gpus_per_node
    sizes = [per_node * nodes for nodes in group_sizes(len(peers) // per_node)]
    messages = GPU_SIZES if cuda else CPU_SIZES
    exchanges = [one for nbytes in messages for one in _collectives(sizes, nbytes)]
    return Exchanges(peers, sizes, exchanges, cuda, clock, Inside(per_node, group.intra_node))


def _seconds(exchange: Exchange, asked: Exchanges, seconds: float) -> float:
    """Median seconds of an exchange on its slowest peer; between CPU devices, the least.

    CPU devices wait for each other whenever another process holds one of their cores. Beside two
    such processes the median of gloo's reduce-scatters of 256 KiB was four times the least.
    """
    middle = statistics.median if asked.cuda else min
    return median_seconds(
        lambda runs: max(asked.peers.call(timed, exchange, runs)), seconds, asked.clock, middle
    )


class KeptSpeed(NamedTuple):
    """Shares of their speed alone that exchanges and work keep beside each other."""

    exchange: float
    work: float
    alone: float  # seconds of an exchange

    def __str__(self) -> str:
        return f"{format_seconds(rounded(self.alone))} alone; both at once, processes together"


def _beside(
    exchange: Exchange, make: Callable[[Peer], Work], peers: Together, seconds: float
) -> KeptSpeed:
    """Exchanges and work, each alone and then together, for about so many seconds in all."""
    part = max(seconds / 4, LEAST_SECONDS)
    runs, alone = _alone(exchange, peers, part)
    peers.call(begin, make)
    usual = statistics.mean(peers.call(rate_of_company, part))
    both = peers.call(timed_beside, exchange, runs)
    peers.call(end)
    slower = max(one.exchange for one in both) / runs
    rate = statistics.mean(one.work for one in both)
    return KeptSpeed(_share(alone / slower), _share(rate / usual), rounded(alone))


def _beside_products(exchange: Exchange, peers: Together, seconds: float) -> KeptSpeed:
    """Exchanges and products of GPUs as `_beside`, with all products queued at once.

    A thread that waits for each of its products leaves gaps between them, in which an exchange has
    the GPU to itself: so seen, products lost nothing on H200s on which those of training lose a
    fifth. Products alone and beside exchanges take turns, as the GPU's clock changes.
    """
    part = max(seconds / 8, LEAST_SECONDS)
    _, alone = _alone(exchange, peers, part)
    rate = statistics.mean(one.work for one in peers.call(multiplied, FEW_QUEUED, exchange, 0))
    products = min(MOST_QUEUED, max(FEW_QUEUED, ceil(part * rate)))
    exchanges = ceil(2 * products / rate / alone)  # longer than products, slow as those may be
    usual, both = list[Beside](), list[Beside]()
    for _ in range(TURNS):
        usual += peers.call(multiplied, products, exchange, 0)
        both += peers.call(multiplied, products, exchange, exchanges)
    slower = max(one.exchange for one in both)
    kept = statistics.mean(b.work for b in both) / statistics.mean(u.work for u in usual)
    return KeptSpeed(_share(alone / slower), _share(kept), rounded(alone))


def _alone(exchange: Exchange, peers: Together, seconds: float) -> tuple[int, float]:
    """How many exchanges take about so long, and the seconds of one, with nothing beside them."""
    alone = max(peers.call(timed, exchange, 3)) / 3
    runs = max(3, ceil(seconds / alone))
    return runs, max(peers.call(timed, exchange, runs)) / runs


def _share(value: float) -> float:
    return min(1.0, max(LEAST_SHARE, rounded(value)))
