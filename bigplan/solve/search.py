"""Search over strategies: bounds first, then models, then simulations.

Every strategy climbs four rungs, each dearer than the one before: a bound from arithmetic, one that
knows the GPU's memory, its linear programs, and at last its plans, simulated. A queue refines what
looks fastest: a bound, or where the linear programs were solved their estimate of the simulated
step. It ends when no bound is below the best plan simulated, or when several strategies in a row
brought next to nothing.

An estimate is no bound, so each strategy keeps its highest bound besides; the least of them, raised
by integer programs where that is worth it, says how far from the optimum the answer can be at most.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from bigplan.errors import InputError
from bigplan.graph.strategy import Strategy, legal_strategies
from bigplan.program import Lane
from bigplan.solve.bounds import cheap_bound, memory_outlook
from bigplan.solve.candidate import (
    MORE_SURCHARGES,
    SURCHARGES,
    Candidate,
    Placed,
    Trial,
    Workload,
    model_outlook,
    optimum,
    play,
    problem_of,
    resolve,
)
from bigplan.solve.decisions import decisions_of
from bigplan.solve.pins import Pin
from bigplan.solve.shortage import infeasible

MODEL_GAP = 0.01  # a bound this close to the best plan is not worth raising
PATIENCE = 5  # strategies simulated in a row without progress before the search ends
PROGRESS = 0.002  # a plan that is faster by less is none
POLISHED = 2  # best strategies that more surcharges are tried on
CERTIFIED = 8  # integer programs, and
CERTIFIED_RELAXATIONS = 200  # linear ones, solved to raise the bound at most


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
    rivals: tuple[Trial, ...]  # other strategies' best plans, fastest first
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
    """The fastest plan in simulation of the strategies that look best in the model.

    Raises InputError (no legal strategy) and InfeasibleError (none fits).
    """
    every = candidates(workload, scope)
    state = _State(every, scope.pins)
    state.explore()
    if not state.trials:
        raise infeasible(workload, every, scope.pins)
    state.polish()
    state.certify()
    best, *rivals = sorted(state.trials, key=_preference)
    values = decisions_of(best.candidate.graph, best.placement)
    modelled = problem_of(best.candidate, scope.pins).step_seconds(values)
    return Found(
        best=play(best.candidate, best.placement),
        rivals=tuple(rivals),
        model_seconds=max(state.bound, min([modelled, *state.optima.values()])),
        bound=state.bound,
        strategies=len(every),
        relaxations=state.relaxations,
        programs=state.programs,
    )


class _Rung(IntEnum):
    """What the queue knows of a strategy."""

    ARITHMETIC = 0
    MEMORY = 1
    MODEL = 2


@dataclass(order=True, frozen=True, slots=True)
class _Waiting:
    seconds: float  # what to hope for, or to expect
    index: int
    rung: _Rung


class _State:
    """What is known of every strategy while the search goes on."""

    def __init__(self, every: list[Candidate], pins: tuple[Pin, ...]) -> None:
        self._every, self._pins = every, pins
        self._bounds = [cheap_bound(c.graph, c.costs) for c in every]  # infinite: nothing fits
        self._relaxed: set[int] = set()
        self.optima: dict[int, float] = {}  # the model's optimum, where it was solved for
        self.trials: list[Trial] = []
        self.relaxations = self.programs = 0

    @property
    def bound(self) -> float:
        """No plan of any strategy is faster."""
        return min(self._bounds)

    @property
    def best(self) -> float:
        """Simulated seconds of the fastest plan so far."""
        return min((trial.seconds for trial in self.trials), default=inf)

    def explore(self) -> None:
        """Refine what looks fastest until no bound is below the best plan, or patience ends."""
        queue = [_Waiting(s, i, _Rung.ARITHMETIC) for i, s in enumerate(self._bounds)]
        heapq.heapify(queue)
        idle = 0
        while queue and idle < PATIENCE:
            head, before = heapq.heappop(queue), self.best
            if self._bounds[head.index] >= before:
                continue
            if head.rung is _Rung.MODEL:
                self._resolve(head.index)
                progress = self.best < before * (1 - PROGRESS)
                idle = 0 if progress else idle + bool(self.trials)
            else:
                seconds = self._refine(head.index, head.rung)
                heapq.heappush(queue, _Waiting(seconds, head.index, _Rung(head.rung + 1)))

    def certify(self) -> None:
        """Raise the least bounds, as long as that narrows the gap."""
        queue = [(seconds, index) for index, seconds in enumerate(self._bounds)]
        heapq.heapify(queue)
        last = self.relaxations + CERTIFIED_RELAXATIONS
        while queue[0][0] * (1 + MODEL_GAP) < self.best:
            _, index = queue[0]
            if index in self.optima or len(self.optima) == CERTIFIED or self.relaxations == last:
                return
            if index in self._relaxed:
                self._solve(index)
            else:
                self._refine(index, _Rung.ARITHMETIC)
                self._refine(index, _Rung.MEMORY)
            heapq.heapreplace(queue, (self._bounds[index], index))

    def _refine(self, index: int, rung: _Rung) -> float:
        """Raise a strategy's bound beyond `rung`; what to expect of it now."""
        candidate = self._every[index]
        if rung is _Rung.ARITHMETIC:
            found = memory_outlook(candidate.graph, candidate.costs)
        else:
            self.relaxations += 1
            self._relaxed.add(index)
            found = model_outlook(problem_of(candidate, self._pins), self.best)
        self._bounds[index] = max(self._bounds[index], found.bound)
        return max(self._bounds[index], found.estimate)

    def _resolve(self, index: int) -> None:
        """Simulate the strategy's plans; keep the best, if it is the best of all."""
        self.programs += 1
        candidate = self._every[index]
        trial = resolve(candidate, problem_of(candidate, self._pins), SURCHARGES)
        self.trials += [trial] if trial is not None else []

    def polish(self) -> None:
        """Try more surcharges on the best strategies."""
        self.trials.sort(key=_preference)
        for i, trial in enumerate(self.trials[:POLISHED]):
            problem = problem_of(trial.candidate, self._pins)
            better = resolve(trial.candidate, problem, MORE_SURCHARGES, trial)
            self.trials[i] = better or trial

    def _solve(self, index: int) -> None:
        """Raise a strategy's bound to its integer optimum."""
        self.programs += 1
        candidate = self._every[index]
        self.optima[index] = found = optimum(problem_of(candidate, self._pins))
        self._bounds[index] = max(self._bounds[index], found)


def _preference(trial: Trial) -> tuple[float, float, str]:
    """Fastest first; among equals the one that moves least, then by name."""
    moving = sum(seconds for lane, seconds in trial.busy.items() if lane != Lane.COMPUTE)
    return round(trial.seconds, 9), moving, str(trial.candidate.strategy)
