"""CBC's word on a problem, which HiGHS has had no part in."""

from __future__ import annotations

import pulp

from bigplan.solve.linear import Problem, var
from bigplan.solve.rows import rows, time_unit
from bigplan.solve.thresholds import NOISE


def cbc_objective(problem: Problem, rho: float = 0.0, *, relaxed: bool = False) -> float | None:
    """Seconds of the step and its surcharge at their best; None where nothing fits."""
    problem = problem.without(problem.excluded)
    model, unit = pulp.LpProblem("placement", pulp.LpMinimize), time_unit(problem)
    whole = {v.name: v.integer and not relaxed for v in problem.variables}
    upper = {row.name: None for row in problem.times} | {v.name: v.upper for v in problem.variables}
    variables = {
        name: model.add_variable(
            name, 0, most, pulp.LpInteger if whole.get(name) else pulp.LpContinuous
        )
        for name, most in upper.items()
    }
    for number, row in enumerate(rows(problem)):
        terms = pulp.LpAffineExpression({variables[n]: c for n, c in row.terms.items()})
        sense = pulp.LpConstraintEQ if row.equal else pulp.LpConstraintLE
        model += pulp.LpConstraint(terms, sense, str(number), row.limit)
    objective = var("step") + problem.serial * (rho / unit)
    model.setObjective(pulp.lpSum(c * variables[n] for n, c in objective.terms.items()))
    cbc = getattr(pulp, "PULP_CBC_CMD", pulp.COIN_CMD)  # PuLP 4 has CBC in a package of its own
    model.solve(cbc(msg=False, gapRel=NOISE, threads=1))
    found = model.status == pulp.LpStatusOptimal
    return (float(pulp.value(model.objective)) + objective.constant) * unit if found else None
