"""Search over strategies, best bound first.

Every strategy waits in one queue under a lower bound of its step: first a cheap one, then the LP
relaxation's, then its integer optimum. The head of the queue is refined; the search ends when the
head cannot beat the best plan found by more than the gap. What is left in the queue, and every
strategy that was resolved, keeps its bound, and the least of them certifies the answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bigplan.errors import InputError
from bigplan.graph.strategy import Strategy, legal_strategies
from bigplan.solve.bounds import cheap_bound
from bigplan.solve.candidate import (
    Candidate,
    Placed,
    Workload,
    problem_of,
    relaxed_bound,
    resolve,
)
from bigplan.solve.pins import Pin
from bigplan.solve.shortage import infeasible

MODEL_GAP = 0.01  # stop when no strategy can be this much faster than the best one in the model
RUNNERS_UP = 5  # strategies simulated although the gap is closed: the simulator has the last word


@dataclass(frozen=True, slots=True)
class Scope:
    """What the search may choose from."""

    fixed: dict[str, int] = field(default_factory=dict)  # strategy fields the user pinned
    pins: tuple[Pin, ...] = ()
    allowed: Callable[[Strategy], bool] = lambda strategy: True


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan, its rivals, and how sure that is."""

    best: Placed
    rivals: tuple[Placed, ...]  # other strategies' best plans, fastest first
    model_seconds: float  # the best strategy's optimum in the model
    bound: float  # no plan of any strategy is faster
    strategies: int
    relaxations: int
    programs: int

    @property
    def model_gap(self) -> float:
        """How much slower the model's best is than the bound."""
        return self.model_seconds / self.bound - 1.0

    @property
    def simulated_gap(self) -> float:
        """How much slower the simulated plan is than the bound."""
        return self.best.seconds / self.bound - 1.0


@dataclass(order=True, slots=True)
class _Waiting:
    bound: float
    order: int
    candidate: Candidate = field(compare=False)
    relaxed: bool = field(compare=False, default=False)


def candidates(workload: Workload, scope: Scope) -> list[Candidate]:
    """Every legal strategy in scope, priced. Raises InputError where there is none."""
    nodes = workload.nodes
    legal = legal_strategies(workload.model, workload.training, nodes.gpus, nodes.gpus_per_node)
    chosen = [s for s in legal if _matches(s, scope.fixed) and scope.allowed(s)]
    if not chosen:
        fixed = ", ".join(f"{k}={v}" for k, v in scope.fixed.items()) or "the engine's limits"
        raise InputError(
            f"no way to split {workload.model.name} with a global batch of "
            f"{workload.training.global_batch} sequences over {nodes.gpus} GPUs satisfies {fixed}; "
            "dp x tp x pp must equal the GPUs, and dp x micro-batch must divide the global batch"
        )
    return [Candidate.of(workload, strategy) for strategy in chosen]


def _matches(strategy: Strategy, fixed: dict[str, int]) -> bool:
    return all(getattr(strategy, name) == value for name, value in fixed.items())


def search(workload: Workload, scope: Scope) -> Found:
    """The fastest plan in simulation among the strategies the model cannot rule out.

    Raises InputError (no legal strategy) and InfeasibleError (none fits).
    """
    every = candidates(workload, scope)
    queue = [_Waiting(cheap_bound(c.graph, c.costs), i, c) for i, c in enumerate(every)]
    heapq.heapify(queue)
    placed: list[Placed] = []
    bounds: list[float] = []
    relaxations = 0
    while queue and not _finished(queue[0].bound, bounds, placed):
        head = heapq.heappop(queue)
        problem = problem_of(head.candidate, scope.pins)
        if not head.relaxed:
            relaxations += 1
            bound = relaxed_bound(problem)
            if bound is not None:
                bound = max(bound, head.bound)
                heapq.heappush(queue, _Waiting(bound, head.order, head.candidate, relaxed=True))
            continue
        resolved = resolve(head.candidate, problem)
        if resolved is not None:
            bounds.append(max(resolved.bound, head.bound))
            placed += [resolved.placed] if resolved.placed else []
    if not placed:
        raise infeasible(workload, every, scope.pins)
    rivals = sorted(placed, key=_preference)
    return Found(
        best=rivals[0],
        rivals=tuple(rivals[1:]),
        model_seconds=min(bounds),
        bound=min([*bounds, *(waiting.bound for waiting in queue[:1])]),
        strategies=len(every),
        relaxations=relaxations,
        programs=len(bounds),
    )


def _finished(bound: float, bounds: list[float], placed: Iterable[Placed]) -> bool:
    best = min((p.seconds for p in placed), default=None)
    if best is None:
        return False
    closed = bound >= min(bounds) / (1 + MODEL_GAP)
    return bound >= best or (closed and len(bounds) > RUNNERS_UP)


def _preference(placed: Placed) -> tuple[float, int, str]:
    """Fastest first; among equals the one that moves fewest bytes, then by name."""
    moved = sum(event.seconds > 0 and event.lane != "gpu compute" for event in placed.timeline.events)
    return round(placed.seconds, 9), moved, str(placed.candidate.strategy)
