"""Solve a problem with PuLP: HiGHS on one thread with a fixed seed, CBC where HiGHS is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from bigplan.importing import environment
from bigplan.placement import Tier
from bigplan.solve.linear import AtLeast, Linear, Problem, Variable, var
from bigplan.solve.linear_program import LinearProgram
from bigplan.solve.rows import Row, rows, time_unit
from bigplan.solve.thresholds import NOISE, WITHIN

# HiGHS's package imports numpy, whose OpenBLAS starts threads. Nothing here uses them, and they
# cost 60 ms of a plan's second on two cores.
with environment(OPENBLAS_NUM_THREADS="1"):
    import pulp

_Built = tuple[pulp.LpProblem, dict[str, pulp.LpVariable]]

EXTRA = var("extra")  # what there is besides: a share of memory, or of what a rule allows
BOUND_GAP = WITHIN / 2  # relative gap at which an optimum is known well enough for a bound
# Nodes after which the best decisions so far are taken, unproven. Of 2,487 programs of 46 searches
# none had more than 197. A limit of seconds would let plans differ from machine to machine.
NODES = 2000

# These problems have less than a hundred variables. HiGHS presolves them again in every search for
# better points, and it searches in smaller problems. Both took two thirds of its time and found
# nothing.
PLAIN = {
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
    proven: bool  # to be the optimum; not where a search ended at NODES


def solver_name() -> str:
    """The solver that `solve` uses here, with its version; recorded in the plan."""
    if highs_available():
        import highspy

        return f"HiGHS {highspy.Highs().version()}"
    return f"CBC (PuLP {pulp.VERSION})"


def highs_available() -> bool:
    """Whether HiGHS is installed; it is, unless somebody took it out."""
    return bool(pulp.HiGHS(msg=False).available())


def _solvers(*, relaxed: bool, gap: float) -> Iterator[pulp.LpSolver]:
    """Solvers in the order in which they are asked: HiGHS, CBC, and both with presolve changed."""
    common = {"msg": False, "mip": not relaxed, "gapRel": gap, "threads": 1}
    cbc = getattr(pulp, "PULP_CBC_CMD", pulp.COIN_CMD)  # PuLP 4 has CBC in a package of its own
    for changed in (False, True):
        if highs_available():
            # Without a surcharge many decisions are as good as others: presolving halves the time.
            presolve = "on" if (gap >= BOUND_GAP) != changed else "off"
            limits = {**PLAIN, "random_seed": 0, "mip_max_nodes": NODES}
            yield pulp.HiGHS(**common, **limits, presolve=presolve)
        yield cbc(**common, presolve=not changed, maxNodes=NODES)


def _solved(model: pulp.LpProblem, proven: Problem | None, *, relaxed: bool, gap: float) -> bool:
    """Whether there are decisions; if not, a proof or two solvers say so of what is to be `proven`.

    Where nothing is, one solver's word will do.
    """
    available = (s for s in _solvers(relaxed=relaxed, gap=gap) if s.available())
    for asked, solver in enumerate(islice(available, 2)):
        if asked and (proven is None or _contradictory(proven)):
            break
        if _finds(solver, model):
            return True
    return False


def _finds(solver: pulp.LpSolver, model: pulp.LpProblem) -> bool:
    """Whether a solver finds decisions, the best ones or those at NODES."""
    try:
        model.solve(solver)
    except KeyError:  # PuLP reads the values, then has no word for HiGHS's end at a limit of nodes
        return bool(model.solverModel.getInfo().mip_gap < inf)
    return bool(model.status == pulp.LpStatusOptimal)


def _contradictory(problem: Problem) -> bool:
    """Whether it is proven that nothing fits, even without integrality."""
    if not highs_available():
        return False
    program = LinearProgram(problem)
    return program.step_seconds(0.0) == inf and program.contradictory()


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
    decisions may need the last bytes. The answer None needs a proof (proof.py), or two solvers
    that find nothing in NODES nodes each.
    """
    excluded = problem.excluded
    problem = problem.without(excluded)
    for spare in sorted({margin, 0.0}, reverse=True):
        model, variables = _build(problem, rows(problem, spare), relaxed=relaxed)
        if below < inf:
            variables["step"].upBound = below / time_unit(problem)
        surcharge = problem.serial * (rho / time_unit(problem)) if rho else Linear()
        every = (var("step") + surcharge).terms.items()
        model.setObjective(pulp.lpSum(c * variables[n] for n, c in every))
        proven = None if spare or below < inf else problem
        if _solved(model, proven, relaxed=relaxed, gap=gap):
            return _solution(problem, model, variables, excluded)
    return None


def _solution(
    problem: Problem,
    model: pulp.LpProblem,
    variables: Mapping[str, pulp.LpVariable],
    excluded: Iterable[str],
) -> Solution:
    values = {name: float(v.value() or 0.0) for name, v in variables.items()}
    values.update(dict.fromkeys(excluded, 0.0))
    times, unit = {row.name for row in problem.times}, time_unit(problem)
    return Solution(
        step_seconds=values["step"] * unit,
        objective=float(pulp.value(model.objective)) * unit,
        values={n: value for n, value in values.items() if n not in times},
        proven=model.sol_status == pulp.LpSolutionOptimal,
    )


def _build(problem: Problem, wanted: Iterable[Row], *, relaxed: bool) -> _Built:
    model, variables = pulp.LpProblem("placement", pulp.LpMinimize), dict[str, pulp.LpVariable]()
    for v in problem.variables:
        category = pulp.LpInteger if v.integer and not relaxed else pulp.LpContinuous
        most = v.upper if v.upper < inf else None
        variables[v.name] = model.add_variable(v.name, 0, most, category)
    for time in problem.times:
        if time.name not in variables:
            variables[time.name] = model.add_variable(time.name, 0)
    for row in wanted:
        terms = pulp.LpAffineExpression({variables[n]: c for n, c in row.terms.items()})
        sense = pulp.LpConstraintEQ if row.equal else pulp.LpConstraintLE
        model += pulp.LpConstraint(terms, sense, row.name, row.limit)
    return model, variables


def relaxed_steps(problem: Problem, surcharges: Iterable[float]) -> Iterator[float]:
    """The step of the best decisions at each surcharge, without integrality; infinite: none fit."""
    highs = LinearProgram(problem.without(problem.excluded)) if highs_available() else None
    for rho in surcharges:
        step = highs.step_seconds(rho) if highs else inf
        if step == inf and not (highs and highs.contradictory()):
            # That nothing fits is proven, or two solvers say so.
            solution = solve(problem, rho, relaxed=True)
            step = inf if solution is None else solution.step_seconds
        yield step


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
