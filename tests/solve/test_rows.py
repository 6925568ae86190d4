from __future__ import annotations

import pytest

from bigplan.solve.formulation import formulate
from bigplan.solve.linear import Linear, Problem, var
from bigplan.solve.rows import rows, scaled, time_unit, timed_rows
from tests.toys import COSTS, toy_graph


def _problem() -> Problem:
    return formulate(toy_graph(), COSTS)


def test_a_row_is_divided_by_its_largest_factor() -> None:
    (row,) = scaled(4e9 * var("a") - 2e9 * var("b") - 8e9, "bytes")
    assert row.terms == {"a": 1.0, "b": -0.5}
    assert (row.limit, row.equal) == (2.0, False)


@pytest.mark.parametrize("equal", [False, True])
def test_what_holds_without_variables_is_no_row(equal: bool) -> None:
    assert list(scaled(Linear(), "nothing", equal=equal)) == []


@pytest.mark.parametrize(("constant", "equal"), [(1.0, False), (1.0, True), (-1.0, True)])
def test_what_no_variable_can_mend_is_a_row_that_never_holds(constant: float, equal: bool) -> None:
    (row,) = scaled(Linear(constant=constant), "broken", equal=equal)
    assert not row.terms
    assert row.limit < 0


def test_slack_without_variables_is_no_row() -> None:
    assert list(scaled(Linear(constant=-1.0), "slack")) == []


def test_no_factor_is_above_one_and_one_of_each_row_is() -> None:
    for row in rows(_problem()):
        assert max(abs(factor) for factor in row.terms.values()) == pytest.approx(1.0)


def test_a_margin_lowers_the_limits_of_capacities_alone() -> None:
    problem = _problem()
    all_of_it, spared = list(rows(problem)), list(rows(problem, 0.5))
    differ = [a.name for a, b in zip(all_of_it, spared, strict=True) if a != b]
    assert differ == [f"{row.stage} {row.tier}" for row in problem.capacities]
    assert all(b.limit < a.limit for a, b in zip(all_of_it, spared, strict=True) if a != b)


def test_times_count_in_units_of_the_longest_constant() -> None:
    problem = _problem()
    unit = time_unit(problem)
    assert unit == max(row.expression.constant for row in problem.times)
    longest = next(row for row in problem.times if row.expression.constant == unit)
    found = [row for row in timed_rows(problem) if row.name.startswith(f"{longest.name} ")]
    assert any(row.limit / row.terms[longest.name] == pytest.approx(1.0) for row in found)
