"""Linear programs of a problem, without integrality: a search solves hundreds for their bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from bigplan.solve.ilp import highs_available, solve
from bigplan.solve.linear import Problem
from bigplan.solve.linear_program import LinearProgram


def relaxed_steps(problem: Problem, surcharges: Iterable[float]) -> Iterator[float]:
    """The step of the best decisions at each surcharge; infinite where nothing fits."""
    highs = LinearProgram(problem.without(problem.excluded)) if highs_available() else None
    for rho in surcharges:
        step = highs.step_seconds(rho) if highs else inf
        if step == inf and not (highs and highs.contradictory()):
            # That nothing fits is proven, or two solvers say so.
            solution = solve(problem, rho, relaxed=True)
            step = inf if solution is None else solution.step_seconds
        yield step
