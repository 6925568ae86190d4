"""The number of nodes that trains for the fewest dollars; the others stay idle.

Fewer nodes communicate less and have a smaller pipeline bubble. But they have less memory, so more
state moves to the host and more is recomputed. Which effect wins is not assumed: each number of
nodes from `node_counts` is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from bigplan.bill import DAY, Bill, bill_of
from bigplan.errors import InfeasibleError, InputError, LateError
from bigplan.graph.build import model_flops
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.solve.choice import node_counts
from bigplan.solve.thresholds import WITHIN
from bigplan.units import format_seconds


class Planned(Protocol):
    """What the caller's planner returns: anything that has a plan."""

    @property
    def plan(self) -> Plan:
        """The plan."""


P = TypeVar("P", bound=Planned)


@dataclass(frozen=True, slots=True)
class Tried:
    """A number of nodes, with its bill or the reason why there is none."""

    nodes: int
    bill: Bill | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cheapest(Generic[P]):
    """The best plan, and all numbers of nodes that were tried, fewest first."""

    best: P
    tried: tuple[Tried, ...]


def cheapest(
    request: Request,
    within: float | None,
    plan: Callable[[Request], P],
    go_on: Callable[[], bool] = lambda: True,
) -> Cheapest[P]:
    """Plan numbers of nodes up to the cluster's; take the cheapest that ends `within` seconds.

    `plan` plans one request. Once `go_on` says stop, the best so far is taken. Of bills that are
    less than a hundredth apart, as far as simulations tell plans apart, the fastest plan is taken.
    Where nothing fits any number of nodes, this raises the error of the largest number; where no
    plan ends in time, LateError.
    """
    tried: list[Tried] = []
    found: list[tuple[Bill, P]] = []
    error: InfeasibleError | InputError | None = None
    for nodes in node_counts(request.cluster.nodes):
        cluster = request.cluster.with_nodes(nodes)
        wanted = replace(request, cluster=cluster, idling=False)
        if found and not go_on():
            tried.append(Tried(nodes, None, "not tried: stopped"))
            continue
        if too_late(wanted, within):
            tried.append(Tried(nodes, None, "too slow even at the GPUs' peak"))
            continue
        try:
            planned = plan(wanted)
        except (InfeasibleError, InputError) as problem:
            error = problem
            tried.append(Tried(nodes, None, str(problem)))
        else:
            bill = bill_of(planned.plan)
            tried.append(Tried(nodes, bill))
            found.append((bill, planned))
    if not found and error is not None:
        raise error
    in_time = [pair for pair in found if pair[0].meets(within)]
    if not in_time:
        raise LateError(_late(found, within, request.cluster.nodes))
    least = min(bill.rank for bill, _ in in_time)
    alike = [planned for bill, planned in in_time if bill.rank <= least * (1 + WITHIN)]
    best = max(alike, key=lambda planned: planned.plan.predicted.tokens_per_second)
    return Cheapest(best, tuple(tried))


def too_late(request: Request, within: float | None) -> bool:
    """Whether the model's own FLOPs alone take longer than `within` at the GPUs' peak."""
    tokens, group = request.training.tokens, request.cluster.group
    if within is None or tokens is None:
        return False
    steps = tokens / request.training.tokens_per_step
    gpu, training = group.gpu, request.training
    peak = max(gpu.peak_flops.values()) if training.fp8_gemms else gpu.peak(training.precision)
    return steps * model_flops(request.model, training) / (group.gpus * peak) > within


def require_in_time(plan: Plan, within: float | None) -> None:
    """Raise LateError where a fastest plan does not end `within` seconds."""
    bill = bill_of(plan)
    if within is not None and bill.days is not None and not bill.meets(within):
        raise LateError(
            f"the fastest plan takes {_lasting(bill.days * DAY)}, and the training may take "
            f"{_lasting(within)}; allow more time (--within) or nodes (--nodes), or train on "
            "fewer tokens"
        )


def _late(found: list[tuple[Bill, P]], within: float | None, most: int) -> str:
    times = [bill.days * DAY for bill, _ in found if bill.days is not None]
    soonest = f"the fastest of them takes {_lasting(min(times))}" if times else ""
    return (
        f"no number of nodes up to {most} ends within {_lasting(within or 0.0)}: "
        f"{soonest or 'none could at its peak'}; allow more nodes (--nodes), more time (--within), "
        "or train on fewer tokens"
    )


def _lasting(seconds: float) -> str:
    return f"{seconds / DAY:.3g} days" if seconds >= DAY else format_seconds(seconds)
