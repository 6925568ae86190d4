"""Exact search for small problems: placements in order of their bound until it passes the best.

The bound of a placement is the model's step for it, below its simulated step; so once the next
bound is no better than the best simulation, no placement left can be. Optimizer state is split in
quarters of what fits, which is the grid the answer is exact on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from bigplan.errors import InputError, VerificationError
from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.solve.candidate import Candidate, Placed, Workload, play, problem_of
from bigplan.solve.decisions import decisions_of
from bigplan.solve.linear import Problem
from bigplan.solve.pins import Pin
from bigplan.solve.search import Found, Scope, candidates
from bigplan.solve.shortage import infeasible
from bigplan.solve.stage import StageClass, stage_classes

QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
MOST_PLACEMENTS = 200_000  # per strategy: bounding takes about 0.3 ms each


def exact_search(workload: Workload, scope: Scope) -> Found:
    """The fastest plan in simulation of all strategies and placements in scope."""
    every = candidates(workload, scope)
    placed = [p for c in every if (p := exact_placement(c, scope.pins)) is not None]
    if not placed:
        raise infeasible(workload, every, scope.pins)
    rivals = sorted(placed, key=lambda p: (p.seconds, str(p.candidate.strategy)))
    best = rivals[0].seconds
    return Found(
        best=rivals[0],
        rivals=tuple(rivals[1:]),
        model_seconds=best,
        bound=best,
        strategies=len(every),
        relaxations=0,
        programs=len(every),
    )


def exact_placement(candidate: Candidate, pins: tuple[Pin, ...] = ()) -> Placed | None:
    """The candidate's fastest placement in simulation; None where none fits."""
    problem = problem_of(candidate, pins)
    bounded = []
    for placement in placements(candidate.graph):
        values = decisions_of(candidate.graph, placement)
        if _keeps_rules(problem, values):
            bounded.append((problem.step_seconds(values), len(bounded), placement))
    best: Placed | None = None
    for bound, _, placement in sorted(bounded, key=lambda item: item[:2]):
        if best is not None and bound >= best.seconds:
            break
        try:
            placed = play(candidate, placement)
        except VerificationError:
            continue  # does not fit
        if best is None or placed.seconds < best.seconds:
            best = placed
    return best


def _keeps_rules(problem: Problem, values: dict[str, float]) -> bool:
    """Whether pins and the limits of layer kinds hold (memory is the verifier's business)."""
    for rule in problem.rules:
        value = rule.expression.at(values)
        if value > 1e-6 or (rule.equal and value < -1e-6):
            return False
    return True


def placements(graph: Graph) -> Iterator[Placement]:
    """Every placement by counts, optimizer state on a grid. Raises InputError where too many."""
    stages = stage_classes(graph)
    choices = [[list(kind_placements(k, n)) for k, n in stage.kinds] for stage in stages]
    number = prod(len(kinds) for stage in choices for kinds in stage)
    if number > MOST_PLACEMENTS:
        raise InputError(
            f"--exact would try {number} placements per strategy; it is for small problems of at "
            f"most {MOST_PLACEMENTS}: pin more decisions with --set, or leave it out"
        )
    for chosen in product(*(kinds for stage in choices for kinds in stage)):
        yield _placement(stages, iter(chosen))


def _placement(stages: tuple[StageClass, ...], chosen: Iterator[KindPlacement]) -> Placement:
    every: list[StagePlacement] = []
    for stage in stages:
        kinds = {kind.name: next(chosen) for kind, _ in stage.kinds}
        every += [StagePlacement(kinds=kinds)] * len(stage.stages)
    return Placement(stages=tuple(every))


def kind_placements(kind: LayerKind, count: int) -> Iterator[KindPlacement]:
    """Every placement of `count` layers of a kind."""
    tiers = list(_compositions(count, 3))
    policies = list(_compositions(count, 6)) if kind.stores_activations else [(count, 0, 0, 0, 0, 0)]
    for parameters, gradients, policy in product(tiers, tiers, policies):
        on_gpu = min(parameters[0], gradients[0])
        for gpu, host in product(sorted({q * on_gpu for q in QUARTERS}), QUARTERS):
            rest = count - gpu
            if rest == 0 and host != QUARTERS[0]:
                continue
            yield KindPlacement(
                layers=count,
                parameters=dict(zip(Tier, parameters, strict=True)),
                gradients=dict(zip(Tier, gradients, strict=True)),
                activations={
                    recompute: dict(zip(Tier, policy[i * 3 : i * 3 + 3], strict=True))
                    for i, recompute in enumerate(Recompute)
                },
                optimizer=dict(
                    zip(Tier, (gpu, rest * host, rest * (1.0 - host)), strict=True)
                ),
            )


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total, -1, -1):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)
