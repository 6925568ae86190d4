"""The nodes of a Ray cluster as a description: each measured by itself, all side by side, and what
collectives reach across them.

Nodes that are alike become one group. The slowest of them describes the group, because a step waits
for it. Other nodes become separate groups.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from bigplan.errors import BigplanError, InputError, PreflightError, WorkerError
from bigplan.launcher.nodes import Node, answering, known
from bigplan.launcher.placing import priority
from bigplan.profile.bench import source
from bigplan.profile.cards import Cards, cards
from bigplan.profile.collectives import BACKENDS, across, measure_link
from bigplan.profile.machine import Profile, Wish, profile_machine
from bigplan.profile.peers import Peer
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.files.dump import numbers
from bigplan.spec.link import Network
from bigplan.units import counted

FREE_SECONDS = 60.0  # for a node that is busy to become free
MEASURE_SECONDS = 900.0  # a node needs five minutes, and the start of torch
MEET_SECONDS = 300.0
ALIKE = 1.1  # host memories of equal machines differ by what their systems keep
APART = 1.25  # of two nodes' figures, from which on it is told
_BLOCKS = ("gpu", "host", "pcie", "nvme", "intra_node")
_LOOPBACK = "lo"

Measure = Callable[[Wish], Profile]


def measure_here(wish: Wish) -> Profile:
    """On the node where it is called."""
    return profile_machine(wish, lambda step: None, lambda text: None)


@dataclass(frozen=True)
class Surveyed:
    """A node as it was measured."""

    node: Node
    profile: Profile

    @property
    def group(self) -> NodeGroup:
        """A group of this node alone."""
        return self.profile.after.group


@dataclass(frozen=True)
class Survey:
    """The cluster, the profiles that stand for its groups, and remarks."""

    cluster: Cluster
    profiles: tuple[Profile, ...]
    notes: tuple[str, ...]


def survey(
    wish: Wish,
    interface: str | None,
    tell: Callable[[str], None],
    measure: Measure = measure_here,
) -> Survey:
    """Measure all nodes of the Ray cluster that this process is connected to.

    `interface`: where processes of several nodes listen for each other. Raises InputError where no
    node can be measured, PreflightError where one is busy, WorkerError where one fails.
    """
    nodes = [node for node in answering(known()) if node.resources.get("CPU", 0) >= 1]
    if not nodes:
        raise InputError("no node of this Ray cluster has a core; start nodes with --num-cpus")
    where = _interface(nodes, interface)
    names = ", ".join(node.there for node in nodes)
    tell(f"Measuring {counted(len(nodes), 'node')} side by side: {names}")
    found = _measured(nodes, wish, measure)
    groups, profiles, notes = [], [], list[str]()
    for number, alike in enumerate(_alike(found), start=1):
        slowest = min(alike, key=lambda one: max(one.group.gpu.peak_flops.values()))
        group = slowest.group.model_copy(update={"name": f"{wish.name}-{number}"})
        notes += _differences(alike)
        if len(alike) > 1:
            tell(f"Measuring collectives across {counted(len(alike), 'node')}")
            link = _between([one.node for one in alike], group, where, wish.seconds)
            group = group.model_copy(update={"nodes": len(alike), "inter_node": link})
        groups.append(group)
        after = slowest.profile.after.model_copy(update={"node_groups": (group,)})
        profiles.append(replace(slowest.profile, after=after))
    if len(groups) > 1 and any(group.inter_node is None for group in groups):
        tell(f"Measuring collectives across all {counted(len(nodes), 'node')}")
        weakest = min(groups, key=lambda group: (group.gpus_per_node, group.host.cores))
        link = _between(nodes, weakest, where, wish.seconds)
        groups = [g.model_copy(update={"inter_node": g.inter_node or link}) for g in groups]
    cluster = Cluster(
        name=wish.name,
        description=f"{counted(len(nodes), 'node')} of a Ray cluster, measured",
        node_groups=tuple(groups),
    )
    return Survey(cluster, tuple(profiles), tuple(notes))


def _interface(nodes: Sequence[Node], wanted: str | None) -> str:
    """Where processes listen; they trust connections, so beyond loopback a user names it."""
    if wanted is None and not all(node.only_loopback for node in nodes) and len(nodes) > 1:
        raise PreflightError(
            f"collectives across {counted(len(nodes), 'node')} go over sockets without "
            "authentication, which listen on an interface that you name: --interface NAME, such "
            "as eth0"
        )
    return wanted or _LOOPBACK


def _measured(nodes: Sequence[Node], wish: Wish, measure: Measure) -> list[Surveyed]:
    """All at the same time, each with all of its node."""

    class Surveyor:
        def measure(self) -> Profile:
            return measure(wish)

    with _hired(Surveyor, [(node, node.resources) for node in nodes]) as actors:
        asked = [actor.measure.remote() for actor in actors]
        return [
            Surveyed(node, profile)
            for node, profile in zip(nodes, _answers(asked, MEASURE_SECONDS), strict=True)
        ]


@contextmanager
def _hired(
    kind: type, places: Sequence[tuple[Node, Any]], *arguments: object
) -> Iterator[list[Any]]:
    """An actor at each place, with so much of its node. Raises PreflightError where one is busy."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    hired = [
        ray.remote(kind)
        .options(
            num_cpus=amounts.get("CPU", 0),
            num_gpus=amounts.get("GPU", 0),
            runtime_env={"env_vars": priority()},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.key, soft=False),
        )
        .remote(*arguments)
        for node, amounts in places
    ]
    try:
        ready = [actor.__ray_ready__.remote() for actor in hired]
        waiting = ray.wait(ready, num_returns=len(ready), timeout=FREE_SECONDS)[1]
        if waiting:
            late = [place[0] for place, one in zip(places, ready, strict=True) if one in waiting]
            busy = {node.there for node in late}
            raise PreflightError(
                f"not free within {FREE_SECONDS:.0f} s: {', '.join(sorted(busy))}; a node is "
                "measured with nothing else on it: wait until it is free, or end what runs there"
            )
        yield hired
    finally:
        for actor in hired:
            ray.kill(actor)


def _answers(asked: Sequence[Any], seconds: float) -> list[Any]:
    """What the actors say. Raises their BigplanErrors, and WorkerError."""
    import ray

    try:
        return list(ray.get(list(asked), timeout=seconds))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, BigplanError):
            raise error.cause from None
        raise WorkerError(f"a node could not be measured: {error.cause}") from error
    except ray.exceptions.GetTimeoutError as error:
        raise WorkerError(f"a node has not answered for {seconds:.0f} s") from error
    except ray.exceptions.RayError as error:
        first = str(error).strip().splitlines()[0]
        raise WorkerError(f"a node was lost while it was measured: {first}") from error


def _alike(found: Sequence[Surveyed]) -> list[list[Surveyed]]:
    """Groups of nodes with the same devices, cores and about the same memory."""
    groups = list[list[Surveyed]]()
    for one in found:
        for group in groups:
            if _equal(group[0].group, one.group):
                group.append(one)
                break
        else:
            groups.append([one])
    return groups


def _equal(first: NodeGroup, second: NodeGroup) -> bool:
    memories = first.host.memory, second.host.memory
    return (
        (first.gpu.name, first.gpus_per_node, first.host.cores, first.nvme is None)
        == (second.gpu.name, second.gpus_per_node, second.host.cores, second.nvme is None)
        and max(memories) <= ALIKE * min(memories)
    )  # fmt: skip


def _differences(alike: Sequence[Surveyed]) -> Iterator[str]:
    """Figures that differ between equal nodes, as by a broken cable or a busy neighbour."""
    for block in _BLOCKS:
        blocks = [getattr(one.group, block) for one in alike]
        if None in blocks:
            continue
        figures = [numbers(each) for each in blocks]
        for name in figures[0]:
            known_by_all = [each[name] for each in figures if name in each]
            values = [value for value, _ in known_by_all]
            if min(values) <= 0 or max(values) <= APART * min(values):
                continue
            least, most = (values.index(pick(values)) for pick in (min, max))
            yield (
                f"{block}.{name} is {known_by_all[least][1]} on {alike[least].node.there} and "
                f"{known_by_all[most][1]} on {alike[most].node.there}"
            )


class _DeviceActor:
    """A process for one device of a node, among those of all nodes."""

    def __init__(self, interface: str) -> None:
        # Read when the first communicator is made; "=": no interface that begins like it.
        if interface not in {name for _, name in socket.if_nameindex()}:
            there = ", ".join(name for _, name in socket.if_nameindex())
            self._refusal = f"--interface {interface}: a node has {there}, none of that name"
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"

    _refusal = ""
    _peer: Peer

    def meet(self, board: Any, rank: int, world: int, cuda: bool, threads: int) -> None:
        """Join the others. Raises PreflightError."""
        import torch
        import torch.distributed as dist

        from bigplan.launcher.meeting import BoardStore
        from bigplan.profile.peers import TIMEOUT

        if self._refusal:
            raise PreflightError(self._refusal)
        torch.set_num_threads(threads)
        self._store = BoardStore(board)
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(
            backend, store=self._store, rank=rank, world_size=world, timeout=TIMEOUT
        )
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        self._peer = Peer(rank, world, device, threads)

    def do(self, work: Any, args: Any, named: Any) -> Any:
        """A function of a module, with this process's Peer."""
        return work(self._peer, *args, **named)

    def cards(self, interface: str, cuda: bool) -> Cards | None:
        """Of its node (profile.cards)."""
        return cards(interface, cuda=cuda)


@dataclass(frozen=True)
class _Devices:
    """Actors as `measure_link` wants its processes (profile.peers.Together)."""

    actors: Sequence[Any]

    def __len__(self) -> int:
        return len(self.actors)

    def call(self, work: Callable[..., Any], *args: Any, **named: Any) -> list[Any]:
        """What each gives back, by rank. Raises WorkerError."""
        asked = [actor.do.remote(work, args, named) for actor in self.actors]
        return _answers(asked, MEET_SECONDS)


def _between(nodes: Sequence[Node], group: NodeGroup, interface: str, seconds: float) -> Network:
    """The network between equal nodes, by a process for each of their devices."""
    import ray

    from bigplan.launcher.meeting import Board

    cuda, per_node = group.gpu.device == "cuda", group.gpus_per_node
    share = {"CPU": 0, "GPU": 1 if cuda else 0}
    places = [(node, share) for node in nodes for _ in range(per_node)]
    threads = max(1, group.host.cores // per_node)
    board = ray.remote(Board).options(num_cpus=0).remote()
    try:
        with _hired(_DeviceActor, places, interface) as actors:
            meeting = [
                actor.meet.remote(board, rank, len(actors), cuda, threads)
                for rank, actor in enumerate(actors)
            ]
            _answers(meeting, MEET_SECONDS)
            asked = across(_Devices(actors), group, time.perf_counter)
            unknown = dict.fromkeys(("bandwidth", "latency", "half_size"), "not measured yet")
            backend = BACKENDS["cuda" if cuda else "cpu"]
            name = f"{backend} between nodes"
            figures = {"bandwidth": 1.0, "latency": 0.0, "half_size": 0}
            network = Network(name=name, **figures, sources=unknown)
            there = _answers([one.cards.remote(interface, cuda) for one in actors], MEET_SECONDS)
            return _with_cards(measure_link(network, asked, seconds / 4), there)
    finally:
        ray.kill(board)


def _with_cards(network: Network, found: Sequence[Cards | None]) -> Network:
    """The network with the fewest cards that a node has; unknown ones are left out."""
    if None in found:
        return network
    fewest = min(one for one in found if one is not None)
    return network.replaced({"nics": fewest.number}, {"nics": source(fewest.how)})
