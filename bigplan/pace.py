"""Steps of plans whose groups of nodes have unequal work: each group's, and the one that paces all.

All ranks run the same actions and meet in the same collectives. So a step is priced for each group
with its own micro-batch and figures, as if it waited for the slowest group in every pass of every
layer. Between that and the group's work alone lies what a step takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from bigplan.cost import Costs, KindCost
from bigplan.lower import lower
from bigplan.plan import Plan, as_groups
from bigplan.program import Program
from bigplan.simulate import step_seconds
from bigplan.solve.candidate import Candidate, Workload


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A step as the ranks of one group of nodes have it."""

    view: Plan  # of plan.as_groups
    candidate: Candidate  # settled; each pass as long as the slowest group's
    programs: tuple[Program, ...]
    seconds: float
    alone: float  # without waiting for the other groups

    @property
    def workload(self) -> Workload:
        """The group's nodes, as many as all groups have, and their part of the training."""
        return workload_of(self.view)


def workload_of(view: Plan) -> Workload:
    """The model, training and nodes of a plan with equal work."""
    return Workload(view.model, view.training, view.cluster.group)


@lru_cache(maxsize=2)
def group_steps(plan: Plan) -> tuple[GroupStep, ...]:
    """The plan's step for each of its groups, in order; of a plan with equal work there is one."""
    views = as_groups(plan)
    joined = Workload(plan.model, views[0].training, plan.cluster.group)
    exchanges = Candidate.of(joined, views[0].strategy).costs.kinds
    own = [_settled(view, plan) for view in views]
    meeting = [_exchanging(one.costs, exchanges) for one in own]
    kinds = {name: _slowest([costs.kinds[name] for costs in meeting]) for name in exchanges}
    found = []
    for view, candidate, mine in zip(views, own, meeting, strict=True):
        together = replace(_slowest_state(mine, meeting), kinds=kinds)
        programs = lower(candidate.graph, plan.placement)
        seconds, alone = (step_seconds(programs, candidate.graph, c) for c in (together, mine))
        waiting = replace(candidate, costs=together)
        found.append(GroupStep(view, waiting, programs, seconds, alone))
    return tuple(found)


def pacing(plan: Plan) -> GroupStep:
    """The step of the group that takes longest."""
    return max(group_steps(plan), key=lambda step: step.seconds)


def _settled(view: Plan, plan: Plan) -> Candidate:
    return Candidate.of(workload_of(view), view.strategy).settled(plan.placement)


def _exchanging(costs: Costs, exchanges: Mapping[str, KindCost]) -> Costs:
    """A group's compute with the collectives of all nodes, which the worst links pace."""
    kinds = {name: kind.exchanging(exchanges[name]) for name, kind in costs.kinds.items()}
    return replace(costs, kinds=kinds)


def _slowest(kinds: Sequence[KindCost]) -> KindCost:
    """Each pass as the group has it that takes longest for it."""
    forward = max(kinds, key=lambda kind: kind.forward)
    backward = max(kinds, key=lambda kind: kind.backward)
    again = {name: max(kinds, key=lambda kind: kind.again(name)) for name in kinds[0].reruns}
    return replace(
        kinds[0],
        forward=forward.forward,
        forward_waits=forward.forward_waits,
        backward=backward.backward,
        backward_waits=backward.backward_waits,
        reruns={name: kind.again(name) for name, kind in again.items()},
        rerun_waits={name: kind.waits_again(name) for name, kind in again.items()},
        tensor_reduce=max(kind.tensor_reduce for kind in kinds),
        launched=None,
    )


# Copies of activations are by micro-batch, and no other group waits for them; all other moves are
# of parameters, gradients and their state, of which every rank has as many.
_OWN = {"h2d", "d2h", "latency"}


def _slowest_state(mine: Costs, every: Iterable[Costs]) -> Costs:
    """The group's prices with the slowest group's work on parameters and their state."""
    rates = [costs.rates for costs in every]
    names = [field.name for field in fields(mine.rates) if field.name not in _OWN]
    worst = {name: min(getattr(rate, name) for rate in rates) for name in names}
    return replace(mine, rates=replace(mine.rates, **worst))
