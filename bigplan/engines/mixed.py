"""Plans for clusters of unlike nodes: which groups of nodes take part in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Generic, NamedTuple, TypeVar

from bigplan.errors import InfeasibleError, InputError
from bigplan.graph.build import model_flops
from bigplan.plan import Mix, Plan, batch_shares
from bigplan.planner import Request
from bigplan.solve.thresholds import WITHIN
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.mixed import choices
from bigplan.spec.unequal import own_groups, without_figures

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Ways(Generic[P]):
    """How choices of groups are planned: `P` is a plan, or a plan with others beside it.

    `unequal` plans groups with work of their own. It answers None where equal work is as good, or
    all that the engine knows. `beside` puts its plan beside what was found with equal work.
    """

    equal: Callable[[Request], P]
    unequal: Callable[[Request, tuple[NodeGroup, ...]], Plan | None]
    plan_of: Callable[[P], Plan]
    beside: Callable[[Plan, P | None], P]


def best_mix(request: Request, ways: Ways[P]) -> tuple[P, tuple[Mix, ...]]:
    """The fastest of the plans that are found for each choice of groups, and what was tried.

    Of choices that are less than a hundredth apart, the one with the fewest GPUs is taken, and
    equal work rather than unequal. Raises InputError or InfeasibleError where no choice has a plan:
    that of the last choice, which has the most groups, but rather that nothing fits.
    """
    groups = own_groups(request.cluster)
    together = choices(request.cluster) if is_mixed(request.cluster) else (request.cluster,)
    state = _Tried(ways)
    for cluster in map(without_figures, together):
        asked = replace(request, cluster=cluster)
        if _least_seconds(request, cluster.group) > state.least:
            state.refused(cluster, "slower even if products alone took time")
            equal = None
        else:
            equal = state.try_out(cluster, partial(ways.equal, asked))
        taken = tuple(groups[member.name] for member in cluster.members or ())
        if len(taken) > 1 and _shared_seconds(request, taken) <= state.least:
            state.try_out(cluster, partial(_unequal, ways, asked, taken, equal), unequal=True)
    if not state.found:
        raise max(state.errors, key=lambda error: isinstance(error, InfeasibleError))
    most = state.least * (1 + WITHIN)
    near = [one for one in state.found if one.seconds <= most]
    return min(near, key=lambda one: one[:-1]).made, tuple(state.mixes)


def _unequal(
    ways: Ways[P], request: Request, groups: tuple[NodeGroup, ...], equal: P | None
) -> P | None:
    plan = ways.unequal(request, groups)
    return None if plan is None else ways.beside(plan, equal)


class _Made(NamedTuple, Generic[P]):
    """A plan; the least is taken of those about as fast."""

    gpus: int
    unequal: bool
    seconds: float
    number: int
    made: P


class _Tried(Generic[P]):
    """What was found so far."""

    def __init__(self, ways: Ways[P]) -> None:
        self._plan_of = ways.plan_of
        self.mixes: list[Mix] = []
        self.found: list[_Made[P]] = []
        self.errors: list[InputError | InfeasibleError] = []

    @property
    def least(self) -> float:
        """Seconds of the fastest plan."""
        return min((one.seconds for one in self.found), default=inf)

    def refused(self, cluster: Cluster, refusal: str, *, unequal: bool = False) -> None:
        """Note why there is no plan."""
        self.mixes.append(Mix(groups=_names(cluster), refusal=refusal, unequal=unequal))

    def try_out(
        self, cluster: Cluster, make: Callable[[], P | None], *, unequal: bool = False
    ) -> P | None:
        """Plan, and note what came of it."""
        try:
            made = make()
        except (InputError, InfeasibleError) as problem:
            self.errors.append(problem)
            self.refused(cluster, str(problem).splitlines()[0], unequal=unequal)
            return None
        if made is None:
            return None
        plan = self._plan_of(made)
        seconds, strategy = plan.predicted.step_seconds, plan.strategy
        self.mixes.append(
            Mix(
                groups=_names(cluster),
                step_seconds=seconds,
                unequal=unequal,
                micro_batches=tuple(group.micro_batch for group in strategy.replicas),
                shares=batch_shares(strategy),
            )
        )
        self.found.append(_Made(strategy.ranks, unequal, seconds, len(self.found), made))
        return made


def _names(cluster: Cluster) -> tuple[str, ...]:
    return tuple(member.name for member in cluster.members or ())


def _least_seconds(request: Request, group: NodeGroup) -> float:
    """What the model's own products take at the rate that large ones reach."""
    return model_flops(request.model, request.training) / (group.gpus * _fastest(group))


def _shared_seconds(request: Request, groups: Iterable[NodeGroup]) -> float:
    """The same where each group takes as much as it can."""
    rate = sum(group.gpus * _fastest(group) for group in groups)
    return model_flops(request.model, request.training) / rate


def _fastest(group: NodeGroup) -> float:
    return max(map(group.gpu.large_products, group.gpu.peak_flops))


def recorded(plan: Plan, tried: tuple[Mix, ...]) -> Plan:
    """The plan, with what else was tried."""
    search = plan.search.model_copy(update={"mixes": tried})
    return plan.model_copy(update={"search": search})


def is_mixed(cluster: Cluster) -> bool:
    """Whether its nodes are unlike, and which of them take part is open."""
    return len(cluster.node_groups) > 1


def is_joined(cluster: Cluster) -> bool:
    """Whether its nodes are unlike, and all take part with figures of their own."""
    return any(member.figures is not None for member in cluster.members or ())
