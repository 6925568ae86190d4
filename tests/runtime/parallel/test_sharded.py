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

RANDOM = {2: 4, 4: 2, 8: 1}  # plans of so many ranks


@pytest.fixture(scope="module", params=list(RANDOM))
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Ranks, and a folder with what they computed: each set of processes starts once."""
    ranks: int = request.param
    folder = tmp_path_factory.mktemp(f"sharded-{ranks}")
    return executed(folder, ranks, lambda _: every_plan(folder, ranks, RANDOM[ranks]))


def test_they_train_as_a_plain_loop_does(ran: Ran, subtests: pytest.Subtests) -> None:
    """And end with one model on all ranks; some have one rank's loss of a validation, too."""
    ranks, folder, plans = ran
    for name, plan in plans.items():
        with subtests.test(name):
            runs = results(folder, name, ranks)
            check_same_model(runs)
            if name.startswith(MASKED):
                check_validation(plan, runs)
            if plan.strategy.tp > 1 and plan.training.precision != "fp32":
                check_in_16_bits(plan, together(runs))
                continue
            exact = check(plan, together(runs))
            if name.startswith("same") and plan.strategy.dp <= 2:
                assert exact == len(runs[0].results) * len(runs[0].states[0])
