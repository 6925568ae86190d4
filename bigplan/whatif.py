"""What would help: the same problem solved again with changes, never guessed.

Changes are better clusters and, where the batch splits badly, a slightly larger batch. What binds
the plan decides which changes are tried: a plan that uses no host memory is not solved again with
more of it. Where nothing fits, all changes that add memory are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from bigplan.batch import LargerBatch, larger_batch
from bigplan.cost.framework import NATIVE
from bigplan.engines import make_plan
from bigplan.errors import InfeasibleError, InputError
from bigplan.placement import Tier
from bigplan.plan import Plan, Predicted
from bigplan.planner import Request
from bigplan.program import Lane
from bigplan.recheck import promised_again
from bigplan.solve.search import Watch, unwatched
from bigplan.spec.cluster import MOST_NODES, Cluster, Member, NodeGroup
from bigplan.spec.link import RATES
from bigplan.spec.part import MachinePart

B = TypeVar("B", bound=MachinePart)

HOST_MEMORY = 64 << 30  # bytes added per node: about one row of memory modules
FULL = 0.9  # a tier with more than this part in use is nearly full
FASTER = 1.01  # times: two searches of one problem may differ by less
DOUBLINGS = 6  # how often the nodes are doubled where nothing fits
MATTERS = 0.05  # of the critical path: faster lanes with a smaller part would gain less than this

NVME = (Lane.NVME_READ, Lane.NVME_WRITE)
PCIE = (Lane.H2D, Lane.D2H)


@dataclass(frozen=True, slots=True)
class Change:
    """A cluster that the user could have instead, and the name of the change."""

    name: str
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a change brings; `step_seconds` is None where there is no plan with the change."""

    change: str
    before_seconds: float | None  # None: without the change nothing fits
    step_seconds: float | None
    bottleneck: str = ""
    reason: str = ""  # why there is no plan

    @property
    def factor(self) -> float | None:
        """How many times faster the step is."""
        if self.before_seconds is None or self.step_seconds is None:
            return None
        return self.before_seconds / self.step_seconds


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcomes of changes, and in `unasked` the names of changes that there was no time for.

    `batch`: a larger batch with more tokens a second, if there is one.
    """

    outcomes: tuple[Outcome, ...]
    unasked: tuple[str, ...]
    batch: LargerBatch | None = None


def what_would_help(
    request: Request,
    plan: Plan | None,
    go_on: Callable[[], bool] = lambda: True,
    watch: Watch = unwatched,
    batch_watch: Watch | None = None,
) -> Answer:
    """Solve the changes that are worth it until `go_on` says stop; `watch` sees every search.

    `plan` is the request's own plan, None where nothing fits. If there is a `batch_watch`, it sees
    the search for a larger batch instead of `watch`. That search then ends with the first plan that
    is worth the change.
    """
    batch, first = None, batch_watch is not None
    if plan is not None:
        batch = larger_batch(request, plan, batch_watch or watch, first=first)
    outcomes: list[Outcome] = []
    unasked: list[str] = []
    for changes in _worth_asking(request.cluster, plan):
        for change in changes:
            outcome = _solved(request, plan, change, watch) if go_on() else None
            if outcome is None:
                unasked.append(change.name)
                break
            outcomes.append(outcome)
            if helps(outcome):
                break
    return Answer(tuple(outcomes), tuple(unasked), batch)


def helps(outcome: Outcome) -> bool:
    """Whether the change makes a plan possible, or the step notably faster."""
    return outcome.step_seconds is not None and (outcome.factor is None or outcome.factor > FASTER)


def _solved(request: Request, plan: Plan | None, change: Change, watch: Watch) -> Outcome | None:
    """The outcome of a change; None where `watch` stopped its search."""
    before = None if plan is None else plan.predicted.step_seconds
    stopped = False
    kept = None if plan is None else _kept(plan, change.cluster)

    def watched(best: float | None, bound: float, left: int) -> bool:
        nonlocal stopped
        stopped = stopped or not watch(best, bound, left)
        return not stopped

    try:
        found = make_plan(replace(request, cluster=change.cluster), watched).predicted
    except (InfeasibleError, InputError) as error:
        return None if stopped else Outcome(change.name, before, None, reason=str(error))
    if kept is not None and kept.step_seconds < found.step_seconds:
        found = kept
    return None if stopped else Outcome(change.name, before, found.step_seconds, found.bottleneck)


def _kept(plan: Plan, cluster: Cluster) -> Predicted | None:
    """What the plan as it is promises on a better cluster with as many GPUs.

    Searches of two clusters may end at strategies of which one is slower, so that a second drive
    seemed to slow Llama 3 8B on an RTX 4090 by 4%. Played again, the plan is 4% faster with it.
    """
    if plan.engine != NATIVE.name or cluster.gpus != plan.cluster.gpus:
        return None
    return promised_again(plan.model_copy(update={"cluster": cluster})).predicted


def _worth_asking(cluster: Cluster, plan: Plan | None) -> Iterator[Iterable[Change]]:
    """Groups of changes that relieve the same limit; the first that helps ends its group."""
    group = cluster.group
    if group.nvme is not None and _uses(plan, Tier.NVME, NVME):
        yield [_changed(cluster, "one more NVMe drive per node", _one_more_drive)]
        if group.nvme.drives > 1:
            yield [_changed(cluster, "twice the NVMe drives per node", _twice_the_drives)]
    if _uses(plan, Tier.HOST, ()):
        yield [_changed(cluster, "64 GiB more host memory per node", _more_host_memory)]
    if _uses(plan, None, (Lane.CPU,)):
        yield [_changed(cluster, "twice the CPU cores and memory channels", _twice_the_cpu)]
    if _uses(plan, None, PCIE):
        yield [_changed(cluster, "twice the PCIe bandwidth", _twice_the_pcie)]
    if group.nodes > 1 and _uses(plan, None, (Lane.COMM, Lane.SEND, Lane.RECV)):
        yield [_changed(cluster, "twice the network bandwidth between nodes", _twice_the_network)]
    yield _more_gpus(cluster) if plan is not None else _many_nodes(cluster)


def _uses(plan: Plan | None, tier: Tier | None, lanes: Iterable[Lane]) -> bool:
    """Whether the tier is nearly full, or the lanes' part of the critical path matters.

    Where nothing fits, every tier counts as full and speed does not count.
    """
    if plan is None:
        return tier is not None
    predicted = plan.predicted
    full = any(
        use.tier is tier and use.used_bytes > FULL * use.capacity_bytes > 0
        for use in predicted.memory
    )
    held_up = sum(predicted.critical_path.get(lane, 0.0) for lane in lanes)
    return full or held_up > MATTERS * predicted.step_seconds


def _more_gpus(cluster: Cluster) -> Iterator[Change]:
    """One more node, and twice the nodes; without a network the same with GPUs of the node.

    Of groups with work of their own, it is one more node of the strongest.
    """
    group, members = cluster.group, cluster.members or ()
    if members and members[0].figures is not None:
        more, twice = _more_nodes(cluster, members[:1]), _more_nodes(cluster, members, times=2)
        yield Change(f"one more node of {members[0].name} ({more.gpus} GPUs)", more)
        yield Change(f"twice the nodes of each group ({twice.gpus} GPUs)", twice)
    elif group.inter_node is not None:
        if group.nodes < MOST_NODES:
            more = cluster.with_nodes(group.nodes + 1)
            yield Change(f"one more node ({more.gpus} GPUs)", more)
        if 1 < group.nodes <= MOST_NODES // 2:
            twice = cluster.with_nodes(2 * group.nodes)
            yield Change(f"twice the nodes ({twice.gpus} GPUs)", twice)
    else:
        gpus = group.gpus_per_node
        yield _changed(cluster, "one more GPU in the node", _with(gpus_per_node=gpus + 1))
        if gpus > 1:
            yield _changed(cluster, "twice the GPUs in the node", _with(gpus_per_node=2 * gpus))


def _more_nodes(cluster: Cluster, of: Sequence[Member], times: int = 1) -> Cluster:
    """So many times the nodes of each of these members; once stands for one more."""
    more = {m.name: _counting(m, times * m.nodes if times > 1 else m.nodes + 1) for m in of}
    members = tuple(more.get(m.name, m) for m in cluster.members or ())
    group = cluster.group.model_copy(update={"nodes": sum(m.nodes for m in members)})
    return cluster.model_copy(update={"node_groups": (group,), "members": members})


def _counting(member: Member, nodes: int) -> Member:
    assert member.figures is not None
    figures = member.figures.model_copy(update={"nodes": nodes})
    return member.model_copy(update={"nodes": nodes, "figures": figures})


def _many_nodes(cluster: Cluster) -> Iterator[Change]:
    """Twice the nodes, four times the nodes and so on, because with enough nodes the model fits."""
    if cluster.group.inter_node is None:
        yield from _more_gpus(cluster)
        return
    doubled = (cluster.group.nodes * 2**doubling for doubling in range(1, DOUBLINGS + 1))
    for nodes in doubled:
        if nodes > MOST_NODES:
            return
        more = cluster.with_nodes(nodes)
        yield Change(f"{more.nodes} nodes ({more.gpus} GPUs)", more)


def _one_more_drive(group: NodeGroup) -> NodeGroup:
    nvme = group.nvme
    return group if nvme is None else _with(nvme=_more(nvme, drives=nvme.drives + 1))(group)


def _twice_the_drives(group: NodeGroup) -> NodeGroup:
    nvme = group.nvme
    return group if nvme is None else _with(nvme=_more(nvme, drives=2 * nvme.drives))(group)


def _more_host_memory(group: NodeGroup) -> NodeGroup:
    host = group.host
    fields = {"memory", "tensor_memory"} if host.tensor_memory else {"memory"}
    return _with(host=_more(host, **{n: getattr(host, n) + HOST_MEMORY for n in fields}))(group)


def _twice_the_cpu(group: NodeGroup) -> NodeGroup:
    rates = ("adam_rate", "adam_rate_beside_copies", "memory_bandwidth")
    return _with(host=_twice(group.host, rates))(group)


def _twice_the_pcie(group: NodeGroup) -> NodeGroup:
    each = ("host_to_device", "device_to_host")
    ways = (*each, "both_ways")
    beside = (f"node_{way}_beside_update" for way in each)
    return _with(pcie=_twice(group.pcie, (*ways, *(f"node_{way}" for way in ways), *beside)))(group)


def _twice_the_network(group: NodeGroup) -> NodeGroup:
    network = group.inter_node
    assert network is not None, "several nodes have a network"
    return _with(inter_node=_twice(network, RATES))(group)


def _twice(block: B, rates: Iterable[str]) -> B:
    """The block with those of these rates doubled that it states."""
    stated = {rate: getattr(block, rate) for rate in rates}
    return _more(block, **{name: 2 * rate for name, rate in stated.items() if rate})


def _more(block: B, **figures: object) -> B:
    return block.model_copy(update=figures)


def _with(**parts: object) -> Callable[[NodeGroup], NodeGroup]:
    return lambda group: group.model_copy(update=parts)


def _changed(cluster: Cluster, name: str, change: Callable[[NodeGroup], NodeGroup]) -> Change:
    """The change of all nodes: the equal ones, and each group's own figures where there are any."""
    members = cluster.members
    if members is not None:
        members = tuple(
            m if m.figures is None else m.model_copy(update={"figures": change(m.figures)})
            for m in members
        )
    changes = {"node_groups": (change(cluster.group),), "members": members}
    return Change(name, cluster.model_copy(update=changes))
