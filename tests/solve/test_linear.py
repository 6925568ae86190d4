from __future__ import annotations

import pytest

from bigplan.placement import Tier
from bigplan.solve.formulation import formulate
from bigplan.solve.linear import AtLeast, Capacity, Linear, Problem, total, var
from tests.toys import COSTS, toy_graph, with_capacity


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


def test_a_tier_without_bytes_excludes_what_would_be_there() -> None:
    x, y = var("x"), var("y")
    assert Capacity("all", Tier.NVME, 2 * x + y, 0.0).excluded == {"x", "y"}
    assert Capacity("all", Tier.NVME, 2 * x + y + 5, 5.0).excluded == {"x", "y"}
    assert not Capacity("all", Tier.NVME, 2 * x + y, 1.0).excluded
    assert not Capacity("all", Tier.NVME, 2 * x - y, 0.0).excluded  # where y is, there is room


def test_without_a_drive_no_row_speaks_of_one() -> None:
    problem = formulate(toy_graph(), with_capacity(COSTS, nvme=0))
    assert {"all.block.parameters.nvme", "all.head.optimizer.nvme"} < problem.excluded
    reduced = problem.without(problem.excluded)
    expressions = [reduced.serial, *(rule.expression for rule in reduced.rules)]
    expressions += [row.expression for row in reduced.times]
    expressions += [row.used for row in reduced.capacities]
    named = {name for expression in expressions for name in expression.terms}
    assert not problem.excluded & (named | {v.name for v in reduced.variables})
    ample = formulate(toy_graph(), COSTS)
    assert ample.without(ample.excluded) is ample
