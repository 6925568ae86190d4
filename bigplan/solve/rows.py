"""A problem's rows as solvers take them well: every factor near one.

Times count in units of about a step, and each row is divided by its largest factor: byte-sized
coefficients make HiGHS call feasible models infeasible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bigplan.solve.linear import Linear, Problem


@dataclass(frozen=True, slots=True)
class Row:
    """The sum of `terms` is at most (`equal`: exactly) `limit`."""

    terms: Mapping[str, float]
    limit: float
    name: str
    equal: bool = False


def time_unit(problem: Problem) -> float:
    """Seconds that count as one in the rows."""
    return max(row.expression.constant for row in problem.times) or 1.0


def rows(problem: Problem, margin: float = 0.0) -> Iterator[Row]:
    """All rules, times and capacities, of which a `margin` stays free."""
    yield from timed_rows(problem)
    for row in problem.capacities:
        limit = row.limit * (1.0 - margin)
        yield from scaled(row.used - limit, f"{row.stage} {row.tier}")


def timed_rows(problem: Problem) -> Iterator[Row]:
    """All rules and times."""
    for i, rule in enumerate(problem.rules):  # pins may repeat each other
        yield from scaled(rule.expression, f"{rule.name} {i}", equal=rule.equal)
    unit, times = time_unit(problem), {row.name for row in problem.times}
    for i, row in enumerate(problem.times):
        # Times are in units of `unit`, everything else is not.
        terms = {n: c if n in times else c / unit for n, c in row.expression.terms.items()}
        terms[row.name] = terms.get(row.name, 0.0) - 1.0
        yield from scaled(Linear(terms, row.expression.constant / unit), f"{row.name} {i}")


def scaled(expression: Linear, name: str, *, equal: bool = False) -> Iterator[Row]:
    """`expression` <= 0 (or = 0) as a row; none where that holds without any variable."""
    size = max((abs(c) for c in expression.terms.values()), default=0.0)
    if size:
        terms = {n: c / size for n, c in expression.terms.items() if c}
        yield Row(terms, -expression.constant / size, name, equal)
    elif expression.constant > 1e-9 or (equal and expression.constant < -1e-9):
        yield Row({}, -1.0, name)  # holds never
