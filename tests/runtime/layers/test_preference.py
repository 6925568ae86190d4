"""Learning from pairs of responses: the paper's loss and gradients, however a plan splits it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from bigplan.errors import InputError
from bigplan.graph.strategy import Strategy
from bigplan.plan import Plan
from bigplan.runtime.layers.preference import losses_of as pair_losses
from bigplan.spec.preference import Preference
from tests.runtime.checkpoints import on_device, running
from tests.runtime.harness import Run, execute, references_of, together
from tests.runtime.layers.pair_loop import (
    PairLoop,
    losses_of,
    losses_of_means,
    pair_training,
    prepare_pairs,
)
from tests.runtime.layers.pair_ranks import LAYOUTS, pair_plan, plans
from tests.runtime.parallel.sharded_ranks import GEMMA4_E, MASKED, results, run_rank, write_plans
from tests.runtime.plans import tiny_model
from tests.runtime.processes import start

# Of sums of some hundred terms, through a model forward and backward, in fp32: 170 roundoffs.
APART = 1e-5
ONE = Strategy(dp=1, micro_batch=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_pairs(tmp_path_factory.mktemp("pairs"))


def check(plan: Plan, run: Run, apart: float = APART) -> None:
    """Losses, rewards and gradients of a run are the loop's."""
    loop = PairLoop(plan)
    if run.validated is not None:
        assert run.validated == pytest.approx(loop.validated(), rel=apart)
    for number, result in enumerate(run.results):
        loss = loop.step()
        assert result.loss == pytest.approx(loss, rel=apart)
        assert result.rewards is not None
        if (
            number or not loop.refers
        ):  # before the first step both are the same model, and rounding tells them apart
            assert result.rewards["accuracy"] == pytest.approx(loop.accuracy)
            assert result.rewards["margin"] != 0
        else:
            assert abs(result.rewards["margin"]) < apart
        if not number:
            check_gradients(run, loop, apart)


def check_gradients(run: Run, loop: PairLoop, apart: float) -> None:
    """What the first step moved weights by is the loop's gradient."""
    rate = loop.plan.training.optimizer.learning_rate
    before, after = run.states[:2]
    for old, new, gradients in zip(before, after, loop.gradients, strict=True):
        wanted = torch.cat([gradient.flatten() for gradient in gradients.values()])
        found = (old.weights - new.weights) / rate
        # A weight has roundings of its own, which the division by the rate makes larger.
        rounding = float(old.weights.abs().max()) * 2.0**-23 / rate
        torch.testing.assert_close(
            found, wanted, rtol=0, atol=apart * float(wanted.abs().max()) + rounding
        )


def test_losses_and_slopes_are_the_formulas() -> None:
    generator = torch.Generator().manual_seed(1)
    policy, reference = (torch.randn(50, 2, generator=generator).double() for _ in range(2))
    for beta, smoothing in ((0.1, 0.0), (2.0, 0.3)):
        asked = Preference(method="dpo", beta=beta, label_smoothing=smoothing)
        scores = (policy - reference).requires_grad_()
        wanted = losses_of(scores, torch.zeros(50, 2), beta, smoothing)
        check_slopes(asked, scores, wanted)
        means = (-policy.abs()).requires_grad_()
        others = ({"method": "simpo", "gamma": 0.7}, {"method": "orpo"})
        for other in others:
            asked = Preference(beta=beta, label_smoothing=smoothing, **other)
            check_slopes(asked, means, losses_of_means(means, asked))


def check_slopes(asked: Preference, scores: torch.Tensor, wanted: torch.Tensor) -> None:
    loss, slopes = pair_losses(asked, scores.detach())
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(slopes, torch.autograd.grad(wanted.sum(), scores)[0])


def test_a_certain_response_has_finite_odds() -> None:
    loss, slopes = pair_losses(Preference(method="orpo"), torch.zeros(3, 2).double())
    assert torch.isfinite(loss).all()
    assert torch.isfinite(slopes).all()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logit_cap": 2.0, "logit_scale": 0.5},
        {"tied_embeddings": True, "sliding_window": 5},
        GEMMA4_E | {"layers": 4, "block_scale": False},
    ],
)
def test_one_rank_trains_as_the_plain_loop_does(data: Path, changes: dict[str, object]) -> None:
    plan = pair_plan(tiny_model(**changes), pair_training(data), ONE)
    plan = plan.model_copy(
        update={"placement": plan.placement.model_copy(update={"loss_chunk": 5})}
    )
    check(plan, execute(plan, validates=True))


@pytest.mark.parametrize("method", ["orpo", "simpo"])
def test_methods_without_a_starting_model_train_as_the_plain_loop_does(
    data: Path, method: str
) -> None:
    training = pair_training(data, preference={"method": method, "label_smoothing": 0.1})
    plan = pair_plan(tiny_model(), training, ONE)
    check(plan, execute(plan, validates=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["generated", "torch"])
@pytest.mark.parametrize("method", ["dpo", "orpo", "simpo"])
def test_a_gpu_trains_as_the_plain_loop_does(data: Path, kernels: str, method: str) -> None:
    training = pair_training(data, kernels=kernels, preference={"method": method})
    plan = pair_plan(tiny_model(logit_cap=2.0), training, ONE)
    check(plan, execute(on_device(plan, "cuda"), steps=2, validates=True), apart=1e-4)


@pytest.mark.gpu
def test_a_gpu_in_16_bits_is_near_it(data: Path) -> None:
    """Of ten tokens a response, whose losses have 8 bits, a margin errs by less than a tenth."""
    training = pair_training(data, precision="bf16")
    plan = pair_plan(tiny_model(), training, ONE)
    run, loop = execute(on_device(plan, "cuda"), steps=2), PairLoop(plan)
    assert [run.losses[0], run.losses[1]] == pytest.approx([loop.step(), loop.step()], abs=0.05)


@pytest.fixture(scope="module", params=list(LAYOUTS))
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Path, dict[str, Plan]]:
    """Ranks, and a folder with what they computed: each set of processes starts once."""
    ranks: int = request.param
    folder = tmp_path_factory.mktemp(f"pairs-{ranks}")
    found = {f"{MASKED}-{name}": plan for name, plan in plans(ranks, folder).items()}
    torch.set_num_threads(1)
    write_plans(folder, found)
    start(run_rank, folder, ranks)
    return ranks, folder, found


def test_ranks_train_as_the_plain_loop_does(
    ran: tuple[int, Path, dict[str, Plan]], subtests: pytest.Subtests
) -> None:
    ranks, folder, found = ran
    for name, plan in found.items():
        with subtests.test(name):
            runs = results(folder, name, ranks)
            assert len({run.finished.digest for run in runs}) == 1
            assert len({run.validated for run in runs}) == 1
            assert all(run.results[-1].rewards == runs[0].results[-1].rewards for run in runs)
            check(plan, together(runs))


def test_a_run_that_goes_on_has_the_same_bits(data: Path, tmp_path: Path) -> None:
    plan = pair_plan(tiny_model(), pair_training(data, clip_norm=0.5), ONE)
    with running(plan) as (worker, _):
        known = references_of(worker)
        worker.refer(known)
        whole = [worker.step().loss for _ in range(4)]
        ended = worker.finish().digest
    with running(plan) as (worker, _):
        worker.refer(known)
        for _ in range(2):
            worker.step()
        worker.save(tmp_path)
    with running(plan, resume=tmp_path) as (worker, done):
        assert done == 2
        with pytest.raises(AssertionError, match="not the weights that training started from"):
            worker.score("training", 0)
        worker.refer(known)
        assert [worker.step().loss for _ in range(2)] == whole[2:]
        assert worker.finish().digest == ended


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_adapters_start_from_the_frozen_model(data: Path, dropout: float) -> None:
    """New adapters change nothing, so the reference is the model without them."""
    full = pair_plan(tiny_model(), pair_training(data), ONE)
    adapted = pair_training(data, lora={"rank": 4, "dropout": dropout})
    plan = pair_plan(tiny_model(), adapted, ONE)
    with running(full) as (one, _), running(plan) as (other, _):
        expected, found = references_of(one), references_of(other)
        np.testing.assert_allclose(found["training"], expected["training"], rtol=1e-6)
        other.refer(found)
        before, after = other.step(), [other.step() for _ in range(3)][-1]
        assert before.loss == pytest.approx(math.log(2))
        assert after.rewards is not None
        assert after.rewards["margin"] > 0
        assert other.evaluate_pairs() == other.evaluate_pairs()


def test_data_without_pairs_is_refused(data: Path) -> None:
    plan = pair_plan(tiny_model(), pair_training(data), ONE)
    plain = plan.training.model_copy(update={"preference": None})
    wrong = plan.model_copy(update={"training": plain})
    with pytest.raises(InputError, match="pairs of a chosen and a rejected response"):
        execute(wrong)
