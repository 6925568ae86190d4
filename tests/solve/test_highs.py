from __future__ import annotations

from math import inf

import pytest

from bigplan.solve.formulation import formulate
from bigplan.solve.highs import HighsProgram
from bigplan.solve.ilp import relaxed_steps
from tests.cbc import cbc_objective
from tests.toys import COSTS, toy_graph, with_capacity

ROOMS = [5000, 3000, 2000, 1000]  # bytes of the GPU: for all of the model, part of it, nothing


@pytest.mark.parametrize("gpu", ROOMS)
def test_the_least_step_is_that_of_another_solver(gpu: int) -> None:
    problem = formulate(toy_graph(), with_capacity(COSTS, gpu=gpu))
    expected = cbc_objective(problem, relaxed=True)
    (found,) = relaxed_steps(problem, [0.0])
    assert found == pytest.approx(inf if expected is None else expected)


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


def test_a_run_that_is_wrong_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fits, never = (formulate(toy_graph(), with_capacity(COSTS, gpu=gpu)) for gpu in (3000, 10))
    (expected,) = relaxed_steps(fits, [0.0])
    blind(monkeypatch)
    assert list(relaxed_steps(fits, [0.0])) == pytest.approx([expected])
    assert list(relaxed_steps(never, [0.0])) == [inf]


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let HiGHS find nothing in any program that it has not presolved."""
    best = HighsProgram.best

    def found(program: HighsProgram, rho: float) -> dict[str, float] | None:
        return best(program, rho) if program.presolved else None

    monkeypatch.setattr(HighsProgram, "best", found)
