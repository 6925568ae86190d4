from __future__ import annotations

from math import inf

import pytest

from bigplan.solve import ilp
from bigplan.solve.formulation import formulate
from bigplan.solve.ilp import relaxed_steps, solve
from bigplan.solve.linear_program import LinearProgram
from tests.toys import COSTS, toy_graph, with_capacity

ROOMS = [5000, 3000, 2000, 1000]  # bytes of the GPU: for all of the model, part of it, nothing


@pytest.mark.parametrize("gpu", ROOMS)
def test_the_least_step_is_that_of_pulp_without_integrality(gpu: int) -> None:
    problem = formulate(toy_graph(), with_capacity(COSTS, gpu=gpu))
    expected = solve(problem, relaxed=True)
    (found,) = relaxed_steps(problem, [0.0])
    assert found == pytest.approx(inf if expected is None else expected.step_seconds)


@pytest.mark.parametrize("gpu", ROOMS)
def test_a_surcharge_never_makes_the_step_shorter(gpu: int) -> None:
    problem = formulate(toy_graph(), with_capacity(COSTS, gpu=gpu))
    free, dear = relaxed_steps(problem, [0.0, 10.0])
    assert dear >= free * (1 - 1e-6)


def test_the_order_of_surcharges_does_not_matter_for_the_bound() -> None:
    problem = formulate(toy_graph(), with_capacity(COSTS, gpu=3000))
    (alone,) = relaxed_steps(problem, [0.0])
    *_, last = relaxed_steps(problem, [0.1, 0.0])
    assert last == pytest.approx(alone)


def test_without_highs_another_solver_answers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = formulate(toy_graph(), with_capacity(COSTS, gpu=3000))
    ours = list(relaxed_steps(problem, [0.0]))
    monkeypatch.setattr(ilp, "highs_available", lambda: False)
    assert list(relaxed_steps(problem, [0.0])) == pytest.approx(ours)


def test_that_nothing_fits_is_proven_or_for_two_solvers_to_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fits, never = (formulate(toy_graph(), with_capacity(COSTS, gpu=gpu)) for gpu in (3000, 10))
    (expected,) = relaxed_steps(fits, [0.0])
    monkeypatch.setattr(LinearProgram, "step_seconds", lambda self, rho: inf)
    assert list(relaxed_steps(fits, [0.0])) == pytest.approx([expected])
    assert list(relaxed_steps(never, [0.0])) == [inf]
