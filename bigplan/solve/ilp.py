"""Linear and integer programs of a problem, solved with HiGHS on one thread with a fixed seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from bigplan.importing import environment
from bigplan.placement import Tier
from bigplan.solve.linear import AtLeast, Capacity, Linear, Problem
from bigplan.solve.rows import Row, rows, scaled, time_unit, timed_rows
from bigplan.solve.thresholds import NOISE, WITHIN

# HiGHS's package imports numpy, whose OpenBLAS starts threads. Nothing here uses them, and they
# cost 60 ms of a plan's second on two cores.
with environment(OPENBLAS_NUM_THREADS="1"):
    import highspy

BOUND_GAP = WITHIN / 2  # relative gap at which an optimum is known well enough for a bound

# These problems have less than a hundred variables. HiGHS presolves them again in every search for
# better points, and it searches in smaller problems. Both took two thirds of its time and found
# nothing.
OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "random_seed": 0,
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
    """The solver with its version; recorded in the plan."""
    return f"HiGHS {highspy.Highs().version()}"


class _Model:
    """A program in HiGHS: the problem's decisions and times, other columns, and these rows."""

    def __init__(
        self, problem: Problem, wanted: Iterable[Row], *others: str, relaxed: bool
    ) -> None:
        limits = {v.name: v.upper for v in problem.variables}
        for name in (*(row.name for row in problem.times), *others):
            limits.setdefault(name, highspy.kHighsInf)
        # HiGHS goes another way where columns are in another order, so the order is by name.
        limits = dict(sorted(limits.items()))
        self._columns = {name: index for index, name in enumerate(limits)}
        self._highs = highspy.Highs()
        for option, value in OPTIONS.items():
            self._highs.setOptionValue(option, value)
        self._highs.addVars(len(limits), [0.0] * len(limits), list(limits.values()))
        whole = [] if relaxed else [self._columns[v.name] for v in problem.variables if v.integer]
        kinds = [highspy.HighsVarType.kInteger] * len(whole)
        self._highs.changeColsIntegrality(len(whole), whole, kinds)
        self._add(list(wanted))

    def _add(self, every: list[Row]) -> None:
        sizes = [len(row.terms) for row in every]
        self._highs.addRows(
            len(every),
            [row.limit if row.equal else -highspy.kHighsInf for row in every],
            [row.limit for row in every],
            sum(sizes),
            [0, *accumulate(sizes[:-1])],
            [self._columns[name] for row in every for name in row.terms],
            [factor for row in every for factor in row.terms.values()],
        )

    def limit(self, name: str, most: float) -> None:
        """Hold a column to at most this."""
        self._highs.changeColBounds(self._columns[name], 0.0, most)

    def least(
        self, objective: Mapping[str, float], *, gap: float = NOISE, sure: bool = True
    ) -> dict[str, float] | None:
        """The columns' values where the objective is least, within `gap`; None: nothing fits.

        `sure`: that nothing fits is found twice, with and without presolving.
        """
        costs = [objective.get(name, 0.0) for name in self._columns]
        self._highs.changeColsCost(len(costs), list(range(len(costs))), costs)
        self._highs.setOptionValue("mip_rel_gap", gap)
        # Without a surcharge many decisions are as good as others: presolving halves the time.
        presolve = gap >= BOUND_GAP
        for way in (presolve, not presolve)[: 1 + sure]:
            self._highs.setOptionValue("presolve", "on" if way else "off")
            if way is not presolve:
                self._highs.clearSolver()
            self._highs.run()
            if self._highs.getModelStatus() == highspy.HighsModelStatus.kOptimal:
                values = self._highs.getSolution().col_value
                return dict(zip(self._columns, values, strict=True))
        return None


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
    decisions may need the last bytes.
    """
    excluded = problem.excluded
    problem = problem.without(excluded)
    objective, unit = _objective(problem, rho), time_unit(problem)
    for spare in sorted({margin, 0.0}, reverse=True):
        model = _Model(problem, rows(problem, spare), relaxed=relaxed)
        if below < inf:
            model.limit("step", below / unit)
        values = model.least(objective, gap=gap, sure=not spare and below == inf)
        if values is not None:
            least = sum(factor * values[name] for name, factor in objective.items())
            times = {row.name for row in problem.times}
            decided = {n: value for n, value in values.items() if n not in times}
            decided.update(dict.fromkeys(excluded, 0.0))
            return Solution(values["step"] * unit, least * unit, decided)
    return None


def _objective(problem: Problem, rho: float) -> Mapping[str, float]:
    surcharge = problem.serial * (rho / time_unit(problem))
    return {"step": 1.0, **surcharge.terms} if rho else {"step": 1.0}


def relaxed_steps(problem: Problem, surcharges: Iterable[float]) -> Iterator[float]:
    """The step of the best decisions at each surcharge, if parts of layers may be decided.

    Infinite where nothing fits. Each program starts from the optimum of the one before.
    """
    problem = problem.without(problem.excluded)
    model, unit = _Model(problem, rows(problem), relaxed=True), time_unit(problem)
    for rho in surcharges:
        values = model.least(_objective(problem, rho))
        yield inf if values is None else values["step"] * unit


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
        worst = max((row.limit for row in problem.capacities if row.tier is tier), default=0.0)
        unit, wanted = max(worst, 1e9), [*timed_rows(timeless)]
        for row in problem.capacities:
            used = row.used - row.limit * (1.0 - margin)
            if row.tier is tier:
                used += Linear({"extra": -unit * (1.0 - margin)})
            wanted += scaled(used, f"{row.stage} {row.tier}")
        model = _Model(timeless, wanted, "extra", relaxed=relaxed)
        if (values := model.least({"extra": 1.0})) is not None:
            stage = _fullest(problem.capacities, tier, values)
            found.append(Shortage(stage, tier, values["extra"] * unit))
    return found


def excess(problem: Problem, named: str, *, relaxed: bool = True) -> float | None:
    """The least by which rules whose names end so must be broken for a plan to fit.

    In the unit of these rules; None: nothing fits, however much they are broken. `relaxed` as in
    `shortages`.
    """
    broken = [rule for rule in problem.rules if rule.name.endswith(named)]
    kept = tuple(rule for rule in problem.rules if rule not in broken)
    timeless = replace(problem, rules=kept, times=(AtLeast("step", Linear()),))
    wanted = [*rows(timeless, 0.0 if relaxed else NOISE)]
    for rule in broken:
        loose = rule.expression + Linear({"extra": -1.0})
        wanted += scaled(loose, rule.name, equal=rule.equal)
    values = _Model(timeless, wanted, "extra", relaxed=relaxed).least({"extra": 1.0})
    return None if values is None else values["extra"]


def _fullest(capacities: tuple[Capacity, ...], tier: Tier, values: Mapping[str, float]) -> str:
    rows = [row for row in capacities if row.tier is tier]
    return max(rows, key=lambda row: row.used.at(values) - row.limit).stage
