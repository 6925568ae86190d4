"""A problem's rows in HiGHS: its linear programs, and its integer program.

Whoever asks again gets an answer that starts from the last one. Threads and seed are fixed.
"""

from __future__ import annotations

from itertools import accumulate
from math import inf

from bigplan.importing import environment
from bigplan.solve.linear import Problem, var
from bigplan.solve.proof import contradict
from bigplan.solve.rows import rows, time_unit
from bigplan.solve.thresholds import NOISE, WITHIN

# HiGHS's package imports numpy, whose OpenBLAS starts threads. Nothing here uses them, and they
# cost 60 ms of a plan's second on two cores.
with environment(OPENBLAS_NUM_THREADS="1"):
    import highspy

ROUNDING = 1e-10  # of the largest factor of a proof
BOUND_GAP = WITHIN / 2  # relative gap at which an optimum is known well enough for a bound

# These problems have less than a hundred variables. HiGHS presolves them again in every search for
# better points, and it searches in smaller problems. Both took two thirds of its time and found
# nothing.
PLAIN = {
    "output_flag": False,
    "threads": 1,
    "random_seed": 0,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
}


def solver_name() -> str:
    """The solver with its version; recorded in the plan."""
    return f"HiGHS {highspy.Highs().version()}"


class HighsProgram:
    """The rows of a problem in HiGHS.

    `margin`: the part of each capacity that stays free. `below`: seconds that a step may not
    exceed. `presolved`: whether HiGHS simplifies the rows first.
    """

    def __init__(
        self,
        problem: Problem,
        margin: float = 0.0,
        below: float = inf,
        *,
        presolved: bool = False,
    ) -> None:
        self.presolved = presolved
        self._problem, self._unit = problem, time_unit(problem)
        self._upper = {v.name: v.upper for v in problem.variables}
        for row in problem.times:
            self._upper.setdefault(row.name, inf)
        self._upper["step"] = min(self._upper["step"], below / self._unit)
        self._columns = {name: index for index, name in enumerate(sorted(self._upper))}
        self._rows = list(rows(problem, margin))
        self._highs = highspy.Highs()
        for name, value in PLAIN.items():
            self._highs.setOptionValue(name, value)
        self._highs.setOptionValue("presolve", "on" if presolved else "off")
        upper = [self._upper[name] for name in self._columns]
        self._highs.addVars(len(upper), [0.0] * len(upper), upper)
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

    def whole(self, gap: float = NOISE) -> HighsProgram:
        """From now on with whole numbers, to an objective within `gap` of the best."""
        whole = [self._columns[v.name] for v in self._problem.variables if v.integer]
        kinds = [highspy.HighsVarType.kInteger] * len(whole)
        self._highs.changeColsIntegrality(len(whole), whole, kinds)
        self._highs.setOptionValue("mip_rel_gap", gap)
        return self

    def best(self, rho: float) -> dict[str, float] | None:
        """The best values at a surcharge, times in seconds; None where HiGHS finds none."""
        objective = var("step") + self._problem.serial * (rho / self._unit)
        costs = [objective.terms.get(name, 0.0) for name in self._columns]
        self._highs.changeColsCost(len(costs), list(range(len(costs))), costs)
        self._highs.run()
        if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        values = map(float, self._highs.getSolution().col_value)
        found = dict(zip(self._columns, values, strict=True))
        return found | {row.name: found[row.name] * self._unit for row in self._problem.times}

    def contradictory(self) -> bool:
        """Whether it is proven, after HiGHS found no values, that there are none."""
        _, found, ray = self._highs.getDualRay()
        if not found:
            return False
        # Times have no upper limit, so what rounding leaves of their factors would end the proof.
        noise = ROUNDING * max(abs(float(y)) for y in ray)
        factors = [-float(y) if abs(y) > noise else 0.0 for y in ray]
        return contradict(self._rows, factors, self._upper)
