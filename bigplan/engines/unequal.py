"""Plans in which unlike groups of nodes take part, each with micro-batches of a size of its own.

Each choice of sizes is planned as equal nodes (spec/unequal.py). The plan is then priced again for
each group, with the group's own figures. The next sizes follow from these prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bigplan.capabilities.splits import muon_refusal
from bigplan.errors import InfeasibleError, InputError
from bigplan.graph.strategy import Replicas, Strategy
from bigplan.pace import group_steps
from bigplan.plan import Plan, digest
from bigplan.planner import Request, make_plan
from bigplan.recheck import promised_again
from bigplan.solve.search import Watch
from bigplan.solve.thresholds import WITHIN
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.unequal import (
    MOST,
    Sizes,
    as_equal,
    best_sizes,
    first_speeds,
    like_numbers,
    most_ranks,
    step_of,
    together,
    with_figures,
)

# Sizes that are planned at most, once for replicas of one GPU and once for those of several, which
# divide a batch in more ways. The first sizes follow from products alone, which tell how fast
# groups are to each other to a tenth or two. The second follow from a step with the first.
TRIED = 2


def unequal_plan(request: Request, groups: Sequence[NodeGroup], watch: Watch) -> Plan | None:
    """The fastest plan found in which the groups, joined in the request's cluster, work unequally.

    None where equal work suits them best. Raises InfeasibleError or InputError where there is none.
    """
    state = _State(first_speeds(groups))
    for ranks in dict.fromkeys((1, most_ranks(groups))):
        batch = ranks * request.training.global_batch
        for _ in range(TRIED):
            sizes = best_sizes(groups, state.speeds, batch, state.tried, state.most)
            if sizes is None or len(set(sizes)) == 1 or not state.promising(groups, sizes):
                break
            state.tried.add(sizes)
            try:
                state.add(planned(request, groups, sizes, watch))
            except (InfeasibleError, InputError) as error:
                state.problem, state.most = error, max(sizes) - 1
    if state.best is None and state.problem is not None:
        raise state.problem
    return state.best


@dataclass
class _State:
    """What is known while sizes are tried."""

    speeds: tuple[float, ...]  # of the groups' GPUs, in proportion
    most: int = MOST  # the largest size that may still fit
    tried: set[Sizes] = field(default_factory=set)
    best: Plan | None = None
    problem: InfeasibleError | InputError | None = None

    def add(self, plan: Plan) -> None:
        """Take what a group's own work takes for its speed, and the plan if it is the fastest."""
        steps = group_steps(plan)
        self.speeds = tuple(step.view.strategy.micro_batch / step.alone for step in steps)
        if self.best is None or plan.predicted.step_seconds < self.best.predicted.step_seconds:
            self.best = plan

    def promising(self, groups: Sequence[NodeGroup], sizes: Sizes) -> bool:
        """Whether these sizes may shorten the step by more than two searches may differ."""
        if self.best is None:
            return True
        before = tuple(group.micro_batch for group in self.best.strategy.replicas)
        estimate = step_of(groups, sizes, self.speeds) / step_of(groups, before, self.speeds)
        return estimate < 1 - WITHIN


def planned(request: Request, groups: Sequence[NodeGroup], sizes: Sizes, watch: Watch) -> Plan:
    """The plan with micro-batches in these proportions. Raises InfeasibleError or InputError."""
    nodes, largest = as_equal(groups, sizes), max(sizes)

    def allowed(strategy: Strategy) -> bool:
        # Every stage of a replica fills whole nodes of its group.
        whole = all(group.nodes % strategy.pp == 0 for group in groups)
        within = nodes.gpus_per_node % (strategy.tp * strategy.cp) == 0
        # Rows of experts, and replicas of a zero group, would be on other groups of nodes.
        alone = strategy.ep == 1 and not strategy.zero_group
        return strategy.micro_batch % largest == 0 and whole and within and alone

    training = request.training
    if why := muon_refusal(training, {"replicas": sizes}):
        raise InputError(why)
    batch, rest = divmod(training.global_batch * nodes.gpus * largest, together(groups, sizes))
    if rest:
        raise InputError(
            f"a global batch of {training.global_batch} does not divide by micro-batches in "
            f"proportions of {' : '.join(map(str, sizes))}"
        )
    tokens = None if training.tokens is None else training.tokens * batch // training.global_batch
    alike = replace(
        request,
        training=training.model_copy(update={"global_batch": batch, "tokens": tokens}),
        cluster=Cluster(name=request.cluster.name, node_groups=(nodes,)),
        engine="any" if request.engine == "any" else "native",
        idling=False,
        told=False,
        allowed=allowed,
    )
    return _shared_out(make_plan(alike, watch), request, groups, sizes)


def _shared_out(plan: Plan, request: Request, groups: Sequence[NodeGroup], sizes: Sizes) -> Plan:
    """A plan for equal nodes as one for the groups, its promises made for each of them."""
    strategy = plan.strategy
    of_replica, times = strategy.ranks // strategy.dp, strategy.micro_batch // max(sizes)
    replicas = tuple(
        Replicas(number=group.gpus // of_replica, micro_batch=times * size)
        for group, size in zip(like_numbers(groups), sizes, strict=True)
    )
    cluster = with_figures(request.cluster, groups)
    described = {"model": request.model, "training": request.training, "cluster": cluster}
    changes = {
        **described,
        "inputs": {name: digest(one) for name, one in described.items()},
        "strategy": strategy.model_copy(update={"replicas": replicas}),
        "alternatives": (),  # of other strategies only steps on the equal nodes are known
    }
    return promised_again(plan.model_copy(update=changes))
