from __future__ import annotations

import pytest

from bigplan.solve.linear import AtLeast, Linear, Problem, total, var


def test_expressions_add_and_scale() -> None:
    x, y = var("x"), var("y")
    expression = 2 * x - y * 3 + 4 + -(x - 1)
    assert expression == Linear({"x": 1.0, "y": -3.0}, 5.0)
    assert expression.at({"x": 10.0, "y": 2.0, "z": 7.0}) == 9.0
    assert total([x, y, x, Linear(constant=2.0)]) == Linear({"x": 2.0, "y": 1.0}, 2.0)
    assert total([]) == Linear()
    assert 1.0 + x == x + 1.0
    with pytest.raises(KeyError):
        x.at({})


def test_a_step_is_the_largest_of_its_rows() -> None:
    times = (
        AtLeast("F", Linear(constant=2.0)),
        AtLeast("F", 3 * var("x")),
        AtLeast("step", 2 * var("F") + 1),
        AtLeast("step", Linear(constant=4.0)),
    )
    problem = Problem((), (), (), times, Linear())
    assert [problem.step_seconds({"x": x}) for x in (0.0, 1.0)] == [5.0, 7.0]
