"""Integer programs and their relaxations, solved by HiGHS; a second run doubts that none fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from bigplan.placement import Tier
from bigplan.solve.highs import BOUND_GAP, HighsProgram
from bigplan.solve.linear import AtLeast, Problem, Variable, var
from bigplan.solve.thresholds import NOISE

EXTRA = var("extra")  # what there is besides: a share of memory, or of what a rule allows


@dataclass(frozen=True, slots=True)
class Solution:
    """An optimum: the step it promises, the objective with the surcharge, and the decisions."""

    step_seconds: float
    objective: float
    values: Mapping[str, float]


def solve(
    problem: Problem,
    rho: float = 0.0,
    *,
    relaxed: bool = False,
    margin: float = 0.0,
    gap: float = NOISE,
    below: float = inf,
) -> Solution | None:
    """The best decisions, or None where nothing fits, or not with a step of `below` seconds.

    `relaxed` drops integrality; otherwise the objective is within `gap` of the best. `margin` keeps
    a fraction of every capacity free. If nothing fits then, the margin is dropped, because pinned
    decisions may need the last bytes. The answer None needs a proof (proof.py), or two runs that
    agree, one presolved and one not. With a cutoff one will do.
    """
    excluded = problem.excluded
    problem = problem.without(excluded)
    for spare in sorted({margin, 0.0}, reverse=True):
        # Without a surcharge many decisions are as good as others: presolving halves the time.
        for presolved in (gap >= BOUND_GAP, gap < BOUND_GAP):
            program = HighsProgram(problem, spare, below, presolved=presolved)
            found = (program if relaxed else program.whole(gap)).best(rho)
            if found is not None:
                return _solution(problem, rho, found | dict.fromkeys(excluded, 0.0))
            if spare or below < inf or _contradictory(problem):
                break
    return None


def _solution(problem: Problem, rho: float, values: Mapping[str, float]) -> Solution:
    times, step = {row.name for row in problem.times}, values["step"]
    objective = step + rho * problem.serial.at(values)
    return Solution(step, objective, {n: v for n, v in values.items() if n not in times})


def _contradictory(problem: Problem) -> bool:
    """Whether it is proven that nothing fits, even without integrality."""
    program = HighsProgram(problem)
    return program.best(0.0) is None and program.contradictory()


def relaxed_steps(problem: Problem, surcharges: Iterable[float]) -> Iterator[float]:
    """The step of the best decisions at each surcharge, without integrality; infinite: none fit."""
    program = HighsProgram(problem.without(problem.excluded))
    for rho in surcharges:
        if (found := program.best(rho)) is not None:
            yield found["step"]
        elif program.contradictory():
            yield inf
        else:
            # That nothing fits is proven, or two runs say so.
            solution = solve(problem, rho, relaxed=True)
            yield inf if solution is None else solution.step_seconds


@dataclass(frozen=True, slots=True)
class Shortage:
    """How far a strategy is from fitting, if only this tier could grow."""

    stage: str
    tier: Tier
    nbytes: float


def shortages(
    problem: Problem, tiers: Iterable[Tier] = Tier, *, relaxed: bool = True
) -> list[Shortage]:
    """For every tier alone: the fewest bytes more (per GPU, per node) with which a plan fits.

    `relaxed` allows parts of layers, so that the true shortage may be larger.
    """
    margin, found = 0.0 if relaxed else NOISE, []
    for tier in tiers:
        limits = {row.stage: row for row in problem.capacities if row.tier is tier}
        unit = max([1e9, *(row.limit for row in limits.values())])
        more = (unit * (1.0 - margin)) * EXTRA
        grown = (
            replace(row, used=row.used - more) if row.tier is tier else row
            for row in problem.capacities
        )
        least = _least(replace(problem, capacities=tuple(grown)), relaxed, margin)
        if least is not None:
            over = {s: row.used.at(least.values) - row.limit for s, row in limits.items()}
            stage = max(over, key=over.__getitem__)
            found.append(Shortage(stage, tier, least.step_seconds * unit))
    return found


def excess(problem: Problem, named: str, *, relaxed: bool = True) -> float | None:
    """The least by which limits whose names end so must be broken for a plan to fit.

    In the unit of these rules; None: nothing fits, however much they are broken. `relaxed` as in
    `shortages`.
    """
    loose = (
        replace(rule, expression=rule.expression - EXTRA) if rule.name.endswith(named) else rule
        for rule in problem.rules
    )
    margin = 0.0 if relaxed else NOISE
    least = _least(replace(problem, rules=tuple(loose)), relaxed, margin)
    return None if least is None else least.step_seconds


def _least(problem: Problem, relaxed: bool, margin: float) -> Solution | None:
    """Decisions that need the least of what is extra, in place of a step's seconds."""
    extra = (Variable(name, inf, False) for name in EXTRA.terms)
    asked = replace(
        problem, variables=(*problem.variables, *extra), times=(AtLeast("step", EXTRA),)
    )
    return solve(asked, relaxed=relaxed, margin=margin)
