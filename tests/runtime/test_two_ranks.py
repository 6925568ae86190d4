"""Two processes with data parallelism over gloo compute what one plain loop over both does."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch.multiprocessing.spawn import spawn

from tests.runtime.harness import STEPS, check, same
from tests.runtime.two_ranks import WORLD, cases, result, run_rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Both processes have run all cases once: starting them takes seconds."""
    torch.set_num_threads(1)
    path = str(tmp_path_factory.mktemp("two-ranks"))
    spawn(run_rank, (path,), nprocs=WORLD)  # type: ignore[no-untyped-call]
    return path


@pytest.mark.parametrize("name", cases())
def test_two_ranks_train_as_a_plain_loop_does(folder: str, name: str) -> None:
    plan, run = cases()[name], result(folder, name, 0)
    exact = check(plan, run)
    layers = len(run.states[0])
    assert (exact == STEPS * layers) == name.startswith("same")


@pytest.mark.parametrize("name", cases())
def test_both_ranks_end_with_the_same_model(folder: str, name: str) -> None:
    first, second = (result(folder, name, rank) for rank in range(WORLD))
    assert first.finished.digest
    assert first.finished.digest == second.finished.digest
    assert first.losses == second.losses
    for ours, others in zip(first.states, second.states, strict=True):
        same("between ranks", ours, others)
