"""Solve a problem with PuLP: HiGHS on one thread with a fixed seed, CBC where HiGHS is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

from bigplan.importing import environment
from bigplan.placement import Tier
from bigplan.solve.linear import AtLeast, Capacity, Linear, Problem
from bigplan.solve.rows import Row, rows, scaled, time_unit, timed_rows

# HiGHS's package imports numpy, whose OpenBLAS would start threads that nothing here uses: 60 ms of
# a plan's second on two cores.
with environment(OPENBLAS_NUM_THREADS="1"):
    import pulp

_Built = tuple[pulp.LpProblem, dict[str, pulp.LpVariable]]

BOUND_GAP = 5e-3  # relative gap at which an optimum is known well enough for a bound
GAP = 1e-3  # relative gap at which a placement counts as optimal; simulations differ by more

# These problems have less than a hundred variables. Presolving them anew in every search for better
# points, and the searches in smaller problems, took two thirds of HiGHS's time and found nothing.
PLAIN = {
    "presolve": "off",
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
}


@dataclass(frozen=True, slots=True)
class Solution:
    """An optimum: the step it promises, the objective with the surcharge, and the decisions."""

    step_seconds: float
    objective: float
    values: Mapping[str, float]


def solver_name() -> str:
    """The solver that `solve` uses here, with its version; recorded in the plan."""
    if highs_available():
        import highspy

        return f"HiGHS {highspy.Highs().version()}"
    return f"CBC (PuLP {pulp.VERSION})"


def highs_available() -> bool:
    """Whether HiGHS is installed; it is, unless somebody took it out."""
    return bool(pulp.HiGHS(msg=False).available())


def _solver(*, relaxed: bool, gap: float = GAP) -> pulp.LpSolver:
    if not highs_available():
        return pulp.PULP_CBC_CMD(msg=False, mip=not relaxed, gapRel=gap, threads=1)
    # Without a surcharge many decisions are as good as others: there presolving halves the time.
    options = PLAIN if gap < BOUND_GAP else {**PLAIN, "presolve": "on"}
    return pulp.HiGHS(msg=False, mip=not relaxed, gapRel=gap, random_seed=0, threads=1, **options)


def solve(
    problem: Problem,
    rho: float = 0.0,
    *,
    relaxed: bool = False,
    margin: float = 0.0,
    gap: float = GAP,
    below: float = inf,
) -> Solution | None:
    """The best decisions, or None where nothing fits, or not with a step of `below` seconds.

    `relaxed` drops integrality, else the objective is within `gap` of the best; `margin` keeps a
    fraction of every capacity free, unless nothing fits then: pinned decisions may need the last
    bytes.
    """
    for spare in dict.fromkeys((margin, 0.0)):
        built = _build(problem, rows(problem, spare), relaxed=relaxed)
        if below < inf:
            built[1]["step"].upBound = below / time_unit(problem)
        solution = _minimise(problem, built, rho, _solver(relaxed=relaxed, gap=gap))
        if solution is not None:
            return solution
    return None


def _minimise(
    problem: Problem, built: _Built, rho: float, solver: pulp.LpSolver
) -> Solution | None:
    unit, (model, variables) = time_unit(problem), built
    objective = variables["step"] * 1.0
    if rho:
        surcharge = problem.serial * (rho / unit)
        objective += pulp.lpSum(c * variables[n] for n, c in surcharge.terms.items())
    model.setObjective(objective)
    model.solve(solver)
    if model.status != pulp.LpStatusOptimal:
        return None
    values = {name: float(v.value() or 0.0) for name, v in variables.items()}
    times = {row.name for row in problem.times}
    return Solution(
        step_seconds=values["step"] * unit,
        objective=float(pulp.value(model.objective)) * unit,
        values={name: value for name, value in values.items() if name not in times},
    )


def _build(problem: Problem, wanted: Iterable[Row], *, relaxed: bool) -> _Built:
    model = pulp.LpProblem("placement", pulp.LpMinimize)
    variables = {
        v.name: model.add_variable(
            v.name, 0, v.upper, pulp.LpInteger if v.integer and not relaxed else pulp.LpContinuous
        )
        for v in problem.variables
    }
    for time in problem.times:
        if time.name not in variables:
            variables[time.name] = model.add_variable(time.name, 0)
    for row in wanted:
        _constrain(model, variables, row)
    return model, variables


def _constrain(model: pulp.LpProblem, variables: Mapping[str, pulp.LpVariable], row: Row) -> None:
    terms = pulp.LpAffineExpression({variables[n]: c for n, c in row.terms.items()})
    sense = pulp.LpConstraintEQ if row.equal else pulp.LpConstraintLE
    model += pulp.LpConstraint(terms, sense, row.name, row.limit)


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
        model, variables = _build(timeless, timed_rows(timeless), relaxed=relaxed)
        worst = max((row.limit for row in problem.capacities if row.tier is tier), default=0.0)
        extra = variables["extra"] = model.add_variable("extra", 0)
        unit = max(worst, 1e9)
        for row in problem.capacities:
            used = row.used - row.limit * (1.0 - margin)
            if row.tier is tier:
                used += Linear({"extra": -unit * (1.0 - margin)})
            for constraint in scaled(used, f"{row.stage} {row.tier}"):
                _constrain(model, variables, constraint)
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
