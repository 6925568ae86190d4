"""Ranks that split sequences compute what a plain loop does."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from bigplan.plan import Plan
from tests.runtime.context_ranks import plans
from tests.runtime.harness import check, together
from tests.runtime.processes import start
from tests.runtime.sharded_ranks import results, run_rank, write_plans

pytestmark = pytest.mark.timeout(400)  # the first to ask for them starts the processes

Ran = tuple[int, Path, dict[str, Plan]]


@pytest.fixture(scope="module", params=[2])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Ranks, and a folder with what they computed: each set of processes starts once."""
    ranks: int = request.param
    folder = tmp_path_factory.mktemp(f"context-{ranks}")
    torch.set_num_threads(1)
    found = plans(ranks)
    write_plans(folder, found)
    start(run_rank, folder, ranks)
    return ranks, folder, found


def test_they_train_as_a_plain_loop_does(ran: Ran, subtests: pytest.Subtests) -> None:
    ranks, folder, found = ran
    for name, plan in found.items():
        with subtests.test(name):
            check(plan, together(results(folder, name, ranks)))


def test_they_end_with_the_same_model(ran: Ran, subtests: pytest.Subtests) -> None:
    ranks, folder, found = ran
    for name in found:
        with subtests.test(name):
            first, *others = results(folder, name, ranks)
            assert first.finished.digest
            for other in others:
                assert first.finished.digest == other.finished.digest
                assert first.losses == other.losses
