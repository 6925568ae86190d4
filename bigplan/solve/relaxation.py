"""Linear programs of a problem, without integrality: a search solves hundreds for their bounds.

PuLP takes as long to build one as HiGHS takes to solve it. So these programs go to HiGHS directly,
and the second starts from the optimum of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import inf

from bigplan.solve.ilp import highs_available, solve
from bigplan.solve.linear import Problem
from bigplan.solve.rows import rows, time_unit


def relaxed_steps(problem: Problem, surcharges: Iterable[float]) -> Iterator[float]:
    """The step of the best decisions at each surcharge; infinite where nothing fits."""
    highs = _Relaxation(problem.without(problem.excluded)) if highs_available() else None
    for rho in surcharges:
        step = highs.step_seconds(rho) if highs else inf
        if step == inf:  # that nothing fits is for two solvers to say
            solution = solve(problem, rho, relaxed=True)
            step = inf if solution is None else solution.step_seconds
        yield step


class _Relaxation:
    """A problem's linear program in HiGHS."""

    def __init__(self, problem: Problem) -> None:
        import highspy

        self._problem, self._unit = problem, time_unit(problem)
        upper = {v.name: v.upper for v in problem.variables}
        for row in problem.times:
            upper.setdefault(row.name, highspy.kHighsInf)
        self._columns = {name: index for index, name in enumerate(upper)}
        self._optimal = highspy.HighsModelStatus.kOptimal
        self._highs = highspy.Highs()
        options = {"output_flag": False, "threads": 1, "random_seed": 0, "presolve": "off"}
        for name, value in options.items():
            self._highs.setOptionValue(name, value)
        self._highs.addVars(len(upper), [0.0] * len(upper), list(upper.values()))
        self._add_rows(-highspy.kHighsInf)

    def _add_rows(self, unlimited: float) -> None:
        every = list(rows(self._problem))
        sizes = [len(row.terms) for row in every]
        self._highs.addRows(
            len(every),
            [row.limit if row.equal else unlimited for row in every],
            [row.limit for row in every],
            sum(sizes),
            [0, *accumulate(sizes[:-1])],
            [self._columns[name] for row in every for name in row.terms],
            [factor for row in every for factor in row.terms.values()],
        )

    def step_seconds(self, rho: float) -> float:
        surcharge = self._problem.serial * (rho / self._unit)
        costs = [0.0] * len(self._columns)
        for name, cost in surcharge.terms.items():
            costs[self._columns[name]] = cost
        costs[self._columns["step"]] += 1.0
        self._highs.changeColsCost(len(costs), list(range(len(costs))), costs)
        self._highs.run()
        if self._highs.getModelStatus() != self._optimal:
            return inf
        return float(self._highs.getSolution().col_value[self._columns["step"]]) * self._unit
