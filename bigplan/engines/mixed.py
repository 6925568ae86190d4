"""Plans for clusters of unlike nodes: which groups of nodes take part in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TypeVar

from bigplan.errors import InfeasibleError, InputError
from bigplan.graph.build import model_flops
from bigplan.plan import Mix, Plan
from bigplan.planner import Request
from bigplan.solve.thresholds import WITHIN
from bigplan.spec.cluster import Cluster
from bigplan.spec.mixed import choices

P = TypeVar("P")


def best_mix(
    request: Request, make: Callable[[Request], P], plan_of: Callable[[P], Plan]
) -> tuple[P, tuple[Mix, ...]]:
    """The fastest of the plans that `make` finds for each choice of groups, and what was tried.

    Of choices that are less than a hundredth apart, the one with the fewest GPUs is taken. Raises
    InputError or InfeasibleError where no choice has a plan: the last choice's error, which has the
    most groups, but rather that nothing fits.
    """
    tried, found = list[Mix](), list[tuple[float, int, P]]()
    errors = list[InputError | InfeasibleError]()
    for cluster in choices(request.cluster):
        names = tuple(member.name for member in cluster.members or ())
        least = min((seconds for seconds, _, _ in found), default=inf)
        if _least_seconds(request, cluster) > least:
            slow = "slower even if products alone took time"
            tried.append(Mix(groups=names, refusal=slow))
            continue
        try:
            made = make(replace(request, cluster=cluster))
        except (InputError, InfeasibleError) as problem:
            errors.append(problem)
            tried.append(Mix(groups=names, refusal=str(problem).splitlines()[0]))
            continue
        seconds = plan_of(made).predicted.step_seconds
        tried.append(Mix(groups=names, step_seconds=seconds))
        found.append((seconds, plan_of(made).strategy.ranks, made))
    if not found:
        raise max(errors, key=lambda error: isinstance(error, InfeasibleError))
    most = min(seconds for seconds, _, _ in found) * (1 + WITHIN)
    near = [one for one in found if one[0] <= most]
    return min(near, key=lambda one: (one[1], one[0]))[2], tuple(tried)


def _least_seconds(request: Request, cluster: Cluster) -> float:
    """What the model's own products take at the rate that large ones reach."""
    group, training = cluster.group, request.training
    peaks = {name: rate * group.gpu.gemm_share(name) for name, rate in group.gpu.peak_flops.items()}
    return model_flops(request.model, training) / (group.gpus * max(peaks.values()))


def recorded(plan: Plan, tried: tuple[Mix, ...]) -> Plan:
    """The plan, with what else was tried."""
    search = plan.search.model_copy(update={"mixes": tried})
    return plan.model_copy(update={"search": search})


def is_mixed(cluster: Cluster) -> bool:
    """Whether its nodes are unlike."""
    return len(cluster.node_groups) > 1
