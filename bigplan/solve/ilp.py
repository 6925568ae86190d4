"""Solve a problem with PuLP: HiGHS on one thread with a fixed seed, CBC where HiGHS is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

import pulp

from bigplan.placement import Tier
from bigplan.solve.linear import AtLeast, Capacity, Linear, Problem

_Built = tuple[pulp.LpProblem, dict[str, pulp.LpVariable]]

GAP = 1e-4  # relative gap at which a placement counts as optimal


@dataclass(frozen=True, slots=True)
class Solution:
    """An optimum: the step it promises, the objective with the surcharge, and the decisions."""

    step_seconds: float
    objective: float
    values: Mapping[str, float]


def solver_name() -> str:
    """The solver that `solve` uses here, with its version; recorded in the plan."""
    if pulp.HiGHS(msg=False).available():
        import highspy

        return f"HiGHS {highspy.Highs().version()}"
    return f"CBC (PuLP {pulp.VERSION})"


def _solver(*, relaxed: bool) -> pulp.LpSolver:
    if not pulp.HiGHS(msg=False).available():
        return pulp.PULP_CBC_CMD(msg=False, mip=not relaxed, gapRel=GAP, threads=1)
    return pulp.HiGHS(msg=False, mip=not relaxed, gapRel=GAP, random_seed=0, threads=1)


def solve(
    problem: Problem, rho: float = 0.0, *, relaxed: bool = False, margin: float = 0.0
) -> Solution | None:
    """The best decisions, or None where nothing fits.

    `relaxed` drops integrality; `margin` keeps a fraction of every capacity free, unless nothing
    fits then: pinned decisions may need the last bytes.
    """
    for spare in dict.fromkeys((margin, 0.0)):
        built = _build(problem, spare, relaxed=relaxed)
        solution = _minimise(problem, built, rho, _solver(relaxed=relaxed))
        if solution is not None:
            return solution
    return None


class Relaxation:
    """A problem with integrality dropped, built once for several surcharges."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._built = _build(problem, 0.0, relaxed=True)

    def step_seconds(self, rho: float) -> float:
        """The step of the best decisions; infinite where nothing fits."""
        solution = _minimise(self._problem, self._built, rho, _solver(relaxed=True))
        return inf if solution is None else solution.step_seconds


def _build(problem: Problem, margin: float, *, relaxed: bool) -> _Built:
    model, variables = _model(problem, _time_scale(problem), relaxed)
    for row in problem.capacities:
        limit = row.limit * (1.0 - margin)
        _constrain(model, variables, row.used - limit, f"{row.stage} {row.tier}")
    return model, variables


def _minimise(
    problem: Problem, built: _Built, rho: float, solver: pulp.LpSolver
) -> Solution | None:
    scale, (model, variables) = _time_scale(problem), built
    objective = variables["step"] * 1.0
    if rho:
        surcharge = problem.serial * (rho / scale)
        objective += pulp.lpSum(c * variables[n] for n, c in surcharge.terms.items())
    model.setObjective(objective)
    model.solve(solver)
    if model.status != pulp.LpStatusOptimal:
        return None
    values = {name: float(v.value() or 0.0) for name, v in variables.items()}
    rows = {row.name for row in problem.times}
    return Solution(
        step_seconds=values["step"] * scale,
        objective=float(pulp.value(model.objective)) * scale,
        values={name: value for name, value in values.items() if name not in rows},
    )


def _time_scale(problem: Problem) -> float:
    """Seconds per unit of time in the model: about a step, so that coefficients are near 1."""
    return max(1e-9, *(row.expression.constant for row in problem.times))


def _model(
    problem: Problem, scale: float, relaxed: bool
) -> tuple[pulp.LpProblem, dict[str, pulp.LpVariable]]:
    model = pulp.LpProblem("placement", pulp.LpMinimize)
    variables = {
        v.name: pulp.LpVariable(
            v.name, 0, v.upper, pulp.LpInteger if v.integer and not relaxed else pulp.LpContinuous
        )
        for v in problem.variables
    }
    for row in problem.times:
        if row.name not in variables:
            variables[row.name] = pulp.LpVariable(row.name, 0)
    for rule in problem.rules:
        _constrain(model, variables, rule.expression, rule.name, equal=rule.equal)
    times = {row.name for row in problem.times}
    for i, row in enumerate(problem.times):
        # Times are in units of `scale`, everything else is not.
        scaled = {n: c if n in times else c / scale for n, c in row.expression.terms.items()}
        scaled[row.name] = scaled.get(row.name, 0.0) - 1.0
        expression = Linear(scaled, row.expression.constant / scale)
        _constrain(model, variables, expression, f"{row.name} {i}")
    return model, variables


def _constrain(
    model: pulp.LpProblem,
    variables: Mapping[str, pulp.LpVariable],
    expression: Linear,
    name: str,
    *,
    equal: bool = False,
) -> None:
    """Add `expression` <= 0 (or = 0), divided by its largest factor.

    Byte-sized coefficients make HiGHS call feasible models infeasible.
    """
    size = max((abs(c) for c in expression.terms.values()), default=0.0)
    if size == 0.0:
        if expression.constant > 1e-9 or (equal and abs(expression.constant) > 1e-9):
            model += pulp.LpConstraint(pulp.LpAffineExpression({}), pulp.LpConstraintGE, name, 1.0)
        return
    terms = {variables[n]: c / size for n, c in expression.terms.items() if c}
    sense = pulp.LpConstraintEQ if equal else pulp.LpConstraintLE
    limit = -expression.constant / size
    model += pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, name, limit)


@dataclass(frozen=True, slots=True)
class Shortage:
    """How far a strategy is from fitting, if only this tier could grow."""

    stage: str
    tier: Tier
    nbytes: float


def shortages(
    problem: Problem, tiers: Iterable[Tier] = Tier, *, relaxed: bool = True, margin: float = 0.0
) -> list[Shortage]:
    """For every tier alone: the fewest bytes more (per GPU, per node) with which a plan fits.

    `relaxed` allows parts of layers, so that the true shortage may be larger.
    """
    timeless = replace(problem, times=(AtLeast("step", Linear()),))
    found = []
    for tier in tiers:
        model, variables = _model(timeless, 1.0, relaxed)
        worst = max((row.limit for row in problem.capacities if row.tier is tier), default=0.0)
        extra = variables["extra"] = pulp.LpVariable("extra", 0)
        unit = max(worst, 1e9)
        for row in problem.capacities:
            used = row.used - row.limit * (1.0 - margin)
            if row.tier is tier:
                used += Linear({"extra": -unit * (1.0 - margin)})
            _constrain(model, variables, used, f"{row.stage} {row.tier}")
        model.setObjective(extra * 1.0)
        model.solve(_solver(relaxed=relaxed))
        if model.status == pulp.LpStatusOptimal:
            stage = _fullest(problem.capacities, tier, variables)
            found.append(Shortage(stage, tier, float(extra.value()) * unit))
    return found


def _fullest(
    capacities: tuple[Capacity, ...], tier: Tier, variables: Mapping[str, pulp.LpVariable]
) -> str:
    values = {name: float(v.value() or 0.0) for name, v in variables.items()}
    rows = [row for row in capacities if row.tier is tier]
    return max(rows, key=lambda row: row.used.at(values) - row.limit).stage
