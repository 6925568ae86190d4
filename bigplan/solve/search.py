"""Search over strategies: bounds first, then models, then simulations.

Strategies that compute the same form a family. A family has one bound, and is opened when that
bound is the least. Then every strategy climbs three rungs, each at a higher cost than the one
before: arithmetic, its linear programs, and at last simulations of its plans. A queue refines the
strategy that looks fastest, by its bound, then by what linear programs make of the simulated step.
The search ends when no bound is below the best simulated plan, or when several strategies in a row
gained next to nothing and those with the least bounds did not, either.

An estimate is not a bound, so each strategy also keeps its highest bound. Further programs raise
the least of these bounds if that is worth it. The least bound says how far from the optimum the
answer can be at most. A stopped search answers with the best plan and the least bound so far.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from bigplan.effort import Effort
from bigplan.errors import InfeasibleError, InputError
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import StrategyFamily
from bigplan.placement import Rings
from bigplan.solve.bounds import cheap_bound, family_bound, lacks_room, saved_by_groups
from bigplan.solve.candidate import Candidate, Placed, Trial, Workload, verified
from bigplan.solve.choice import Choice, Scope
from bigplan.solve.decisions import decisions_of
from bigplan.solve.improve import BUDGETS, further, improved
from bigplan.solve.pins import rings_tried
from bigplan.solve.resolve import (
    bounding_problem,
    fits,
    model_outlook,
    optimum,
    planned,
    problem_of,
)
from bigplan.solve.shortage import infeasible
from bigplan.solve.simplicity import complexity, simplest
from bigplan.solve.thresholds import NEAR, NOISE, WITHIN, patience

__all__ = ["Choice", "Found", "Scope", "Watch", "search", "unwatched"]

# What waits is counted again after this many steps, or after this part of its number where that is
# more: counting 13,000 strategies every 16 steps took a tenth of a search.
COUNTED = 16
# Strategies simulated at last for their bounds, which count no move twice. Estimates add a share of
# what moves: where compute hides it they were up to 11% above the step. Of 24 plans of 2 to 4 B on
# an RTX 4090 ten are 2 to 7% faster; four or eight strategies in place of two find no more.
DOUBTED = 2
CERTIFIED = 8  # strategies whose integer programs are solved, and
CERTIFIED_RELAXATIONS = 200  # linear programs, to raise the bound at most
# Strategies that differ in these alone take about as much longer than their estimates: of 40 sets
# of Mixtral's on 10 Gb/s Ethernet 34 agree within 3%, all within 9%; steps are 7 to 73% longer.
ALIKE = "zero", "zero_group", "first_blocks", "last_blocks"
MORE = 1 + WITHIN  # strategies expected within it of the best may be simpler, and are not put off


# Called before every step of a search, with the simulated seconds of the best plan so far, a bound
# below every plan, and the number of families and strategies that may still hold a faster plan.
# Answers whether to go on.
Watch = Callable[[float | None, float, int], bool]


def unwatched(best: float | None, bound: float, left: int) -> bool:
    """Go on to the end."""
    return True


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
    stopped: bool = False  # before its end, by the user

    @property
    def model_gap(self) -> float:
        """How much slower the model's best is than the bound."""
        return self.model_seconds / self.bound - 1.0


def search(
    workload: Workload, scope: Scope, watch: Watch = unwatched, effort: Effort = Effort.USUAL
) -> Found:
    """The fastest plan in simulation of the strategies that look best in the model.

    Raises InputError (no legal strategy, or stopped before the first plan) and InfeasibleError
    (none fits). An interrupt (Ctrl-C) stops it like `watch` does.
    """
    choice = Choice.of(workload, scope)
    state = _State(choice, watch, effort)
    if not state.waiting:
        raise choice.empty()
    try:
        stopped = not (state.explore() and state.improve() and state.certify())
    except KeyboardInterrupt:
        stopped = True
    if not state.trials:
        if stopped:
            raise InputError(
                f"stopped before any plan was found ({len(state.waiting)} families and strategies "
                "of the search were left); give it more time, or pin decisions with --set"
            )
        if not scope.told:
            raise InfeasibleError(f"{workload.model.name} does not fit")
        raise infeasible(workload, state.choice.candidates(), scope.pins)
    trials = sorted(state.trials, key=_preference)
    best = state.chosen or trials[0]
    rivals = [t for t in trials if t.candidate.strategy != best.candidate.strategy]
    values = decisions_of(best.candidate.graph, best.placement)
    problem = problem_of(best.candidate, scope.pins, Rings.of(best.placement))
    return Found(
        best=verified(best),
        rivals=tuple(rivals),
        model_seconds=max(state.bound, problem.step_seconds(values)),
        bound=state.bound,
        strategies=state.strategies,
        relaxations=state.relaxations,
        programs=state.programs,
        stopped=stopped,
    )


@dataclass(slots=True)
class _Entry:
    """A family, or one of its strategies, with its highest bound; infinite: nothing fits."""

    choice: Choice  # of all nodes, or some of them
    of: StrategyFamily | Strategy | Candidate  # priced in its turn
    bound: float
    estimate: float | None = None  # of the simulated step, once its linear programs are solved
    saved: float = 0.0  # seconds at most, by zero groups of the strategy that have no entry
    final: bool = False  # whether the bound is as high as its programs make it


class _State:
    """What is known of every strategy while the search goes on."""

    def __init__(self, choice: Choice, watch: Watch, effort: Effort = Effort.USUAL) -> None:
        self.choice, self._watch, self._budget = choice, watch, BUDGETS[effort]
        self.trials: list[Trial] = []
        self.chosen: Trial | None = None  # of those about as fast as the fastest
        self.strategies = self.relaxations = self.programs = 0
        self._entries: list[_Entry] = []  # an opened family's place is taken by its members
        self._late: dict[Strategy, float] = {}  # of splits simulated: steps by their estimates
        self._rings = rings_tried(choice.scope.pins)
        self._waiting, self._steps_to_count = 0, 0  # how many wait, as last counted
        self._bounds: list[tuple[float, int]] = []  # of entries; some were raised since
        self._queue: list[tuple[float, int]] = []  # seconds to hope for or to expect, and entry
        for nodes in (choice, *choice.fewer()):
            for family in nodes.families():
                self._add(_Entry(nodes, family, _family_bound(nodes, family)))

    @property
    def bound(self) -> float:
        """No plan of any strategy is faster."""
        return self._least()[0]

    def _least(self) -> tuple[float, int]:
        """The least bound, and whose it is."""
        while True:
            known, index = self._bounds[0]
            entry = self._entries[index]
            if entry.bound == known:
                return known, index
            heapq.heapreplace(self._bounds, (entry.bound, index))

    @property
    def waiting(self) -> list[_Entry]:
        """What may still hold a plan faster than the best."""
        best = self.best
        return [entry for entry in self._entries if entry.bound < best]

    @property
    def best(self) -> float:
        """Seconds that the fastest plan so far is expected to take."""
        return min((trial.expected for trial in self.trials), default=inf)

    def explore(self) -> bool:
        """Refine what looks fastest until no bound is below the best plan, or patience ends."""
        idle = 0
        while self._queue:
            if self._stopped():
                return False
            (expected, index), before = heapq.heappop(self._queue), self.best
            entry = self._entries[index]
            if idle >= patience(expected, before):
                break
            if entry.bound >= before:
                continue
            if isinstance(entry.of, StrategyFamily):
                self._open(entry, entry.of)
            elif isinstance(entry.of, Strategy) or entry.estimate is None:
                heapq.heappush(self._queue, (self._refine(entry, entry.of), index))
            elif (now := self._expected(entry.of, entry.estimate)) > max(expected, before * MORE):
                heapq.heappush(self._queue, (now, index))
            elif not entry.of.strategy.zero_group or expected < before:
                self._resolve(entry.of, entry.estimate)
                progress = self.best < before * (1 - NOISE)
                idle = 0 if progress else idle + bool(self.trials)
        return self._doubt()

    def _doubt(self) -> bool:
        """Simulate strategies whose bounds are least although their estimates are late."""
        known = {trial.candidate.strategy for trial in self.trials}
        late = [
            (entry.bound, entry.estimate, entry.of)
            for entry in self._entries
            if isinstance(entry.of, Candidate) and entry.of.strategy not in known
            if entry.estimate is not None
        ]
        for bound, estimate, candidate in sorted(late, key=lambda one: one[:2])[:DOUBTED]:
            if bound * (1 + WITHIN) >= self.best:
                break
            if self._stopped():
                return False
            trial = self._resolve(candidate, estimate)
            if trial is None or trial.expected > self.best * (1 + NEAR):
                break  # estimates are right here
        return True

    def improve(self) -> bool:
        """Improve the best strategies' plans, choose the simplest about as fast, improve that."""
        pins = self.choice.scope.pins
        for trial in improved(self.trials, pins, self._budget):
            if self._stopped():
                return False
            self._replace(trial)
        self.trials.sort(key=_preference)
        if self.trials:
            simple, pins = simplest(self.trials, pins, self._budget)
            self.chosen = further(simple, pins, self._budget)
        return True

    def _replace(self, better: Trial) -> None:
        """Let a plan take the place of the earlier plan of its strategy."""
        same = (t.candidate.strategy == better.candidate.strategy for t in self.trials)
        self.trials[list(same).index(True)] = better

    def certify(self) -> bool:
        """Raise the least bounds, as long as that narrows the gap."""
        last, programs = self.relaxations + CERTIFIED_RELAXATIONS, self.programs + CERTIFIED
        while (least := self._least())[0] * (1 + WITHIN) < self.best:
            if self._stopped():
                return False
            entry = self._entries[least[1]]
            if entry.final or self.programs == programs or self.relaxations >= last:
                return True
            if isinstance(entry.of, StrategyFamily):
                self._open(entry, entry.of)
            elif isinstance(entry.of, Strategy) or entry.estimate is None:
                self._refine(entry, entry.of)
            else:
                self._solve(entry, entry.of)
        return True

    def _stopped(self) -> bool:
        if not self._steps_to_count:
            self._waiting = len(self.waiting)
            self._steps_to_count = max(COUNTED, len(self._entries) // COUNTED)
        self._steps_to_count -= 1
        best = self.best
        return not self._watch(best if best < inf else None, self.bound, self._waiting)

    def _add(self, entry: _Entry) -> None:
        heapq.heappush(self._queue, (entry.bound, len(self._entries)))
        heapq.heappush(self._bounds, (entry.bound, len(self._entries)))
        self._entries.append(entry)

    def _open(self, entry: _Entry, family: StrategyFamily) -> None:
        """Let the family's strategies take its place.

        Once a strategy is refined, those with zero groups that may gain enough follow it. Until
        then its bound is theirs, too: as if ranks exchanged nothing, whatever ZeRO shards.
        """
        choice, bounds = entry.choice, dict[tuple[int, ...], float]()
        space = choice.space
        for strategy in choice.members(family):
            groups, cut = len(space.groups_tried(strategy)), strategy.cut
            zero = -1 if groups else strategy.zero
            key = (*cut, strategy.accumulation_group, zero, strategy.zero_group)
            if key not in bounds:
                candidate = choice.pricing.candidate(strategy)
                costs = candidate.costs
                if groups:
                    costs = replace(costs, kinds=choice.pricing.alike(strategy)[1].kinds)
                bounds[key] = cheap_bound(candidate.graph, costs)
            self._add(_Entry(choice, strategy, max(entry.bound, bounds[key])))
            self.strategies += 1 + groups
        entry.bound = inf

    def _refine(self, entry: _Entry, of: Strategy | Candidate) -> float:
        """Solve a strategy's linear programs; return the seconds to expect of it now."""
        pins = self.choice.scope.pins
        entry.of = candidate = (
            entry.choice.pricing.candidate(of) if isinstance(of, Strategy) else of
        )
        fitting = not lacks_room(candidate.graph, candidate.costs, self._rings[-1])
        self.relaxations += fitting
        if not fitting or (pins and not fits(candidate, pins)):
            entry.bound = entry.estimate = inf
            return inf
        found = model_outlook(bounding_problem(candidate, pins), self.best)
        entry.saved = self._hybrids(entry, candidate, found.bound)
        entry.bound = max(entry.bound, found.bound - entry.saved)
        entry.estimate = max(entry.bound, found.estimate)
        return self._expected(candidate, entry.estimate)

    def _expected(self, candidate: Candidate, estimate: float) -> float:
        """Seconds to expect of a strategy, as much above the estimate as of those alike.

        Of zero groups a little more, as they must gain that to be chosen: others come first.
        """
        more = 1 + WITHIN if candidate.strategy.zero_group else 1
        return estimate * more * self._late.get(_split(candidate.strategy), 1)

    def _hybrids(self, entry: _Entry, candidate: Candidate, bound: float) -> float:
        """Add what shards over zero groups; seconds that others gain by them at most.

        That is next to nothing, and a plan with a mechanism more is not taken for it.
        """
        most = 0.0
        for strategy in entry.choice.hybrids(candidate.strategy):
            hybrid = entry.choice.pricing.candidate(strategy)
            saved = saved_by_groups(candidate.graph, candidate.costs, hybrid.costs)
            if saved < WITHIN * bound:
                most = max(most, saved)
            else:
                least = max(bound - saved, cheap_bound(hybrid.graph, hybrid.costs))
                self._add(_Entry(entry.choice, hybrid, least))
        return most

    def _resolve(self, candidate: Candidate, estimate: float) -> Trial | None:
        """Simulate the strategy's plans; the better one, or None where none fits."""
        self.programs += 1
        trial = planned(candidate, self._rings, self.choice.scope.pins, self.best)
        if trial is not None:
            self.trials.append(trial)
            split, late = _split(candidate.strategy), trial.expected / estimate
            self._late[split] = min(late, self._late.get(split, late))
        return trial

    def _solve(self, entry: _Entry, candidate: Candidate) -> None:
        """Raise a strategy's bound as far as its programs do."""
        self.programs += 1
        least = optimum(candidate, self.choice.scope.pins)
        entry.bound, entry.final = max(entry.bound, least - entry.saved), True


def _family_bound(choice: Choice, family: StrategyFamily) -> float:
    sample = choice.sample(family)
    assert sample is not None, family
    graph, costs = choice.pricing.alike(sample)
    number = sample.micro_batches(choice.workload.training)
    return family_bound(graph, costs, number, stages=family.pp)


def _split(strategy: Strategy) -> Strategy:
    """The same for strategies that differ in ALIKE alone."""
    return strategy.model_copy(update=dict.fromkeys(ALIKE, 0))


def _preference(trial: Trial) -> tuple[float, tuple[bool, int, bool], str]:
    """Fastest first; among equals the simplest, then by name."""
    return round(trial.expected, 9), complexity(trial), str(trial.candidate.strategy)
