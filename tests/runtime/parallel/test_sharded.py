"""Processes that share out a step in any way compute what a plain loop does.

State (ZeRO), layers (pipelines), what is in a layer (tensor parallelism), and all of them together.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


from tests.runtime.harness import check, together
from tests.runtime.parallel.sharded_ranks import (
    MASKED,
    Ran,
    check_same_model,
    check_validation,
    every_plan,
    executed,
    results,
)
from tests.runtime.rounding import check_in_16_bits

RANDOM = {2: 6, 4: 3, 8: 1}  # plans of so many ranks


@pytest.fixture(scope="module", params=list(RANDOM))
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Ranks, and a folder with what they computed: each set of processes starts once."""
    ranks: int = request.param
    folder = tmp_path_factory.mktemp(f"sharded-{ranks}")
    return executed(folder, ranks, lambda _: every_plan(folder, ranks, RANDOM[ranks]))


def test_they_train_as_a_plain_loop_does(ran: Ran, subtests: pytest.Subtests) -> None:
    ranks, folder, plans = ran
    for name, plan in plans.items():
        with subtests.test(name):
            runs = results(folder, name, ranks)
            if plan.strategy.tp > 1 and plan.training.precision != "fp32":
                check_in_16_bits(plan, together(runs))
                continue
            exact = check(plan, together(runs))
            if name.startswith("same") and plan.strategy.dp <= 2:
                assert exact == len(runs[0].results) * len(runs[0].states[0])


def test_they_end_with_the_same_model(ran: Ran, subtests: pytest.Subtests) -> None:
    ranks, folder, plans = ran
    for name in plans:
        with subtests.test(name):
            check_same_model(results(folder, name, ranks))


def test_they_validate_as_one_does(ran: Ran) -> None:
    ranks, folder, plans = ran
    for name in (name for name in plans if name.startswith(MASKED)):
        check_validation(folder, name, plans[name], ranks)
