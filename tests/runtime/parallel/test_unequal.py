"""Replicas with micro-batches of unlike sizes train as one rank does with the whole batch."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch")


from bigplan.graph.build import build_graph
from bigplan.graph.strategy import Strategy
from bigplan.plan import Plan
from tests.runtime.harness import Run, check, execute, together
from tests.runtime.parallel.sharded_ranks import (
    Ran,
    all_resident,
    check_same_model,
    executed,
    results,
    unequal,
)


@pytest.fixture(scope="module", params=[2, 4])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Ranks, and a folder with what they computed."""
    ranks: int = request.param
    folder = tmp_path_factory.mktemp(f"unequal-{ranks}")
    return executed(folder, ranks, partial(unequal, ranks))


def test_they_train_as_a_plain_loop_does(ran: Ran, subtests: pytest.Subtests) -> None:
    ranks, folder, plans = ran
    for name, plan in plans.items():
        with subtests.test(name):
            runs = results(folder, name, ranks)
            check(plan, together(runs))
            check_same_model(runs)


def test_they_have_the_losses_of_one_rank(ran: Ran, subtests: pytest.Subtests) -> None:
    ranks, folder, plans = ran
    found: dict[tuple[int, int], Run] = {}  # by batch and blocks, all else being one training
    for name, plan in plans.items():
        with subtests.test(name):
            work = plan.training.global_batch, plan.model.layers
            if work not in found:
                found[work] = execute(_alone(plan), validates=True)
            runs = results(folder, name, ranks)
            assert runs[0].losses == pytest.approx(found[work].losses, rel=1e-5)
            expected = pytest.approx(found[work].validated, rel=1e-6)
            assert [run.validated for run in runs[:2]] == [expected] * 2


def _alone(plan: Plan) -> Plan:
    """One rank with all sequences of a step in one micro-batch, everything on its GPU."""
    strategy = Strategy(dp=1, micro_batch=plan.training.global_batch)
    placement = all_resident(build_graph(plan.model, plan.training, strategy))
    return plan.model_copy(update={"strategy": strategy, "placement": placement})
