"""Where the ranks of a plan go: how many a node, and which nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

from bigplan.errors import NoRoomError
from bigplan.launcher.nodes import Node, fitting, known
from bigplan.plan import Plan
from bigplan.units import counted

PLACEMENT_SECONDS = 60.0  # a cluster that is up answers in seconds; autoscaling is asked for first
REMOVE_SECONDS = 5.0  # a Ray that is up takes milliseconds
BUSY_SECONDS = 5.0  # where other nodes would do as well
NICENESS = "RAY_worker_niceness"  # in the environment of a process of Ray's
_A_TRACE = 0.001  # Ray's smallest amount: every node has 1 of the resource that names its address


@dataclass(frozen=True)
class Layout:
    """How many ranks, where, and with how many cores each."""

    ranks: int
    per_node: int
    cores: int
    cuda: bool
    groups: tuple[str, ...] = ()  # whose nodes may be taken, where a plan leaves others idle
    nodes_of: tuple[int, ...] = ()  # of each group, where they have work of their own

    @classmethod
    def of(cls, plan: Plan) -> Layout:
        """All GPUs of as many nodes as the plan needs; a node's cores are shared equally."""
        group = plan.cluster.group
        per_node = min(plan.strategy.ranks, group.gpus_per_node)
        cores = max(1, group.host.cores // per_node)
        cuda = group.gpu.device == "cuda"
        return cls(plan.strategy.ranks, per_node, cores, cuda, _groups_of(plan), _nodes_of(plan))

    @property
    def nodes(self) -> int:
        """Nodes needed."""
        return -(-self.ranks // self.per_node)

    def bundle(self) -> dict[str, float]:
        """What one node must give."""
        bundle = {"CPU": float(self.cores * self.per_node)}
        return bundle | ({"GPU": float(self.per_node)} if self.cuda else {})

    def fitting(self) -> tuple[Node, ...]:
        """The nodes that answer and could take a node's ranks, busy or not.

        Of a plan that leaves groups idle, nodes that say they are of its groups; where none says
        so, all if these are no more than needed. Where groups have work of their own, each group's
        nodes in turn, and no others.
        """
        found = fitting(self.bundle())
        if self.nodes_of:
            return tuple(
                node
                for name, number in zip(self.groups, self.nodes_of, strict=True)
                for node in [n for n in found if n.resources.get(name)][:number]
            )
        named = tuple(n for n in found if any(n.resources.get(name) for name in self.groups))
        choice = bool(self.groups) and len(found) > self.nodes
        return named if named or choice else found


def _groups_of(plan: Plan) -> tuple[str, ...]:
    """The groups whose nodes a plan for a mixed cluster has to tell from others."""
    taken = tuple(member.name for member in plan.cluster.members or ())
    return taken if plan.cluster.left_out or plan.strategy.replicas else ()


def _nodes_of(plan: Plan) -> tuple[int, ...]:
    """How many nodes each of them has, where groups have work of their own."""
    members = plan.cluster.members or ()
    return tuple(member.nodes for member in members) if plan.strategy.replicas else ()


def whole_nodes(plan: Plan) -> Layout:
    """The layout of a plan for all nodes of the cluster, with all that is in them."""
    group = plan.cluster.group
    cores = max(1, group.host.cores // group.gpus_per_node)
    cuda = group.gpu.device == "cuda"
    return Layout(group.gpus, group.gpus_per_node, cores, cuda, _groups_of(plan), _nodes_of(plan))


def gpus_here() -> int:
    """GPUs of this node, seen by this process or not."""
    found: int = _manager().get_current_node_num_accelerators()
    return found


def _manager() -> Any:
    from ray._private.accelerators import get_accelerator_manager_for_resource

    return get_accelerator_manager_for_resource("GPU")


def require_gpus(layout: Layout) -> None:
    """Raise NoRoomError where a local Ray would find fewer GPUs than the plan needs.

    `place` would tell the same after Ray's start, and after complaints that matter less.
    """
    if not layout.cuda:
        return
    visible = _manager().get_current_process_visible_accelerator_ids()
    found = gpus_here() if visible is None else min(gpus_here(), len(visible))
    if found < layout.ranks:
        raise NoRoomError(
            f"the plan needs {counted(layout.ranks, 'GPU')}, and this machine has {found or 'none'}"
            " that can be seen (`bigplan doctor` says why). Launch where the GPUs are, or on a Ray "
            "cluster with --address; or plan for this machine: bigplan detect --out here.yaml"
        )


def place(layout: Layout) -> Any:
    """A placement group with one bundle per node: a node's ranks stay together.

    Raises NoRoomError where there is none.
    """
    found = layout.fitting()
    others = len(found) > layout.nodes and not layout.groups
    if len(found) >= layout.nodes:
        # By name, as Ray still trusts a node that was lost seconds ago.
        group = _group(layout, found[: layout.nodes])
        if group.wait(BUSY_SECONDS if others else PLACEMENT_SECONDS):
            return group
        remove(group)
    if len(found) != layout.nodes and not layout.groups:
        group = _group(layout)
        if group.wait(PLACEMENT_SECONDS if others else 0):
            return group
        remove(group)
    have = "; ".join(
        ", ".join(f"{node.resources.get(name, 0):g} {name}s" for name in layout.bundle())
        for node in known()
    )
    need = ", ".join(f"{amount:g} {name}s" for name, amount in layout.bundle().items())
    raise NoRoomError(
        f"the plan needs {counted(layout.nodes, 'node')} with {need} each, free{_whose(layout)}; "
        f"Ray has nodes with: {have}{_taken(layout, found)}. Plan for the machines there are, "
        "wait until they are free, or name the head of another cluster with --address"
    )


def _taken(layout: Layout, found: Sequence[Node]) -> str:
    """That others hold what would be enough, which no other plan for these nodes mends."""
    if len(found) < layout.nodes:
        return ""
    return f", which others still used after {PLACEMENT_SECONDS:.0f} s"


def _whose(layout: Layout) -> str:
    """Which groups' nodes, and how Ray learns of groups, where a plan has to tell them apart."""
    if not layout.groups:
        return ""
    mark = json.dumps({layout.groups[0]: 1})
    whose = f"{' and '.join(layout.groups)} alone"
    if layout.nodes_of:
        each = zip(layout.nodes_of, layout.groups, strict=True)
        whose = " and ".join(f"{number} {name}" for number, name in each)
    return (
        f", of {whose} (a node says so by a resource of that name: ray start --resources '{mark}')"
    )


def _group(layout: Layout, on: Sequence[Node] = ()) -> Any:
    """A placement group that Ray is asked for; on these nodes, in their order, if any are told."""
    import ray

    bundles = [layout.bundle() for _ in range(layout.nodes)]
    for bundle, node in zip(bundles, on, strict=False):
        bundle[f"node:{node.address}"] = _A_TRACE
    strategy = "STRICT_PACK" if layout.nodes == 1 else "STRICT_SPREAD"
    return ray.util.placement_group(bundles, strategy=strategy)


def priority() -> dict[str, str]:
    """Variables of an actor that is to have the priority of a usual process, or what a user says.

    Ray's own are nice by 15: beside any other process a rank would get a 28th of a core.
    """
    return {NICENESS: os.environ.get(NICENESS, "0")}


def remove(group: Any) -> None:
    """Give its room back, if Ray takes it in time.

    Where a node's raylet has just ended, as by a SIGTERM to all processes of the launch, Ray waits
    for it for ever.
    """
    import ray

    taken = Thread(target=ray.util.remove_placement_group, args=(group,), daemon=True)
    taken.start()
    taken.join(REMOVE_SECONDS)
