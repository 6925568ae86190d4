"""A problem's linear program, without integrality, in HiGHS.

PuLP takes as long to build one as HiGHS takes to solve it. So these programs go to HiGHS directly.
"""

from __future__ import annotations

from itertools import accumulate
from math import inf

from bigplan.solve.linear import Problem
from bigplan.solve.proof import contradict
from bigplan.solve.rows import rows, time_unit

ROUNDING = 1e-10  # of the largest factor of a proof


class LinearProgram:
    """The rows of a problem in HiGHS; a next optimum starts from the last one."""

    def __init__(self, problem: Problem) -> None:
        import highspy

        self._problem, self._unit = problem, time_unit(problem)
        self._upper = {v.name: v.upper for v in problem.variables}
        for row in problem.times:
            self._upper.setdefault(row.name, inf)
        self._columns = {name: index for index, name in enumerate(self._upper)}
        self._rows = list(rows(problem))
        self._optimal = highspy.HighsModelStatus.kOptimal
        self._highs = highspy.Highs()
        options = {"output_flag": False, "threads": 1, "random_seed": 0, "presolve": "off"}
        for name, value in options.items():
            self._highs.setOptionValue(name, value)
        self._highs.addVars(len(self._upper), [0.0] * len(self._upper), list(self._upper.values()))
        self._add_rows()

    def _add_rows(self) -> None:
        every = self._rows
        sizes = [len(row.terms) for row in every]
        self._highs.addRows(
            len(every),
            [row.limit if row.equal else -inf for row in every],
            [row.limit for row in every],
            sum(sizes),
            [0, *accumulate(sizes[:-1])],
            [self._columns[name] for row in every for name in row.terms],
            [factor for row in every for factor in row.terms.values()],
        )

    def step_seconds(self, rho: float) -> float:
        """The step of the best decisions at a surcharge; infinite where HiGHS finds none."""
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

    def contradictory(self) -> bool:
        """Whether it is proven, after HiGHS found no decisions, that there are none."""
        _, found, ray = self._highs.getDualRay()
        if not found:
            return False
        # Times have no upper limit, so what rounding leaves of their factors would end the proof.
        noise = ROUNDING * max(abs(float(y)) for y in ray)
        factors = [-float(y) if abs(y) > noise else 0.0 for y in ray]
        return contradict(self._rows, factors, self._upper)
