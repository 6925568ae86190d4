"""Two processes with data parallelism over gloo compute what one plain loop over both does."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from tests.runtime.harness import check, evaluated, same
from tests.runtime.masked import masked_data, prepare_masked
from tests.runtime.parallel.two_ranks import MASKED, WORLD, cases, result, run_rank
from tests.runtime.processes import start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Both processes have run all cases once: starting them takes seconds."""
    torch.set_num_threads(1)
    path = str(tmp_path_factory.mktemp("two-ranks"))
    prepare_masked(path)
    start(run_rank, path, WORLD)
    return path


@pytest.mark.parametrize("name", cases())
def test_two_ranks_train_as_a_plain_loop_does(folder: str, name: str) -> None:
    plan, run = cases(str(masked_data(folder)))[name], result(folder, name, 0)
    exact = check(plan, run)
    layers = len(run.states[0])
    assert (exact == len(run.results) * layers) == name.startswith("same")


def test_two_ranks_validate_as_one_does(folder: str) -> None:
    """The same weights, and all of the validation's samples; its last batch is not full."""
    plan = cases(str(masked_data(folder)))[MASKED]
    alone = plan.model_copy(update={"strategy": plan.strategy.model_copy(update={"dp": 1})})
    losses = [result(folder, MASKED, rank).validated for rank in range(WORLD)]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(evaluated(alone), rel=1e-6)


@pytest.mark.parametrize("name", cases())
def test_both_ranks_end_with_the_same_model(folder: str, name: str) -> None:
    first, second = (result(folder, name, rank) for rank in range(WORLD))
    assert first.finished.digest
    assert first.finished.digest == second.finished.digest
    assert first.losses == second.losses
    for ours, others in zip(first.states, second.states, strict=True):
        same("between ranks", ours, others)
