"""Losses that count some targets only, and validation beside training."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("torch")

import torch

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.program import Op, expand
from bigplan.runtime.data import IGNORED, BatchSource
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.training import ValidationSpec
from tests.examples import examples
from tests.runtime.harness import check, evaluated, execute, loop_of, started, state_of
from tests.runtime.masked import masked_training, prepare_masked
from tests.runtime.plans import LENGTH, placed, plan_of, plans, tiny_model
from tests.toys import kind_placement

TEXT = b"A short text for validation, of a few windows and some more; and then it ends.\n" * 2


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pairs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield prepare_masked(folder)


@pytest.fixture(scope="module")
def held_out() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "held-out.txt"
        path.write_bytes(TEXT)
        yield path


def _masked(pairs: Path, *, tied: bool = False, away: bool = False, **changes: object) -> Plan:
    """Three groups of two micro-batches."""
    kind = kind_placement(1)
    block = kind_placement(2)
    if away:
        kind = kind_placement(1, Tier.HOST, Tier.HOST, optimizer=Tier.HOST)
        block = kind_placement(2, Tier.NVME, Tier.HOST, (Recompute.NONE, Tier.HOST), Tier.NVME)
    table = kind_placement(1, optimizer=Tier.HOST) if tied else kind
    placement = placed(embedding=table, block=block, head=kind)
    strategy = Strategy(dp=1, accumulation_group=2)
    model = tiny_model(tied_embeddings=tied)
    return plan_of(model, masked_training(6, str(pairs), **changes), strategy, placement)


def _source(plan: Plan, data: Path, batches: int | None = None) -> BatchSource:
    training, micro_batch = plan.training, plan.strategy.micro_batch
    return BatchSource(
        data, LENGTH, micro_batch, 0, 1, training.seed, training.global_batch, batches
    )


@pytest.mark.parametrize(
    ("tied", "away", "clip_norm"),
    [(False, False, None), (True, True, None), (True, False, 0.5), (False, True, 0.5)],
)
def test_masked_targets_train_as_a_plain_loop_does(
    pairs: Path, tied: bool, away: bool, clip_norm: float | None
) -> None:
    plan = _masked(pairs, tied=tied, away=away, clip_norm=clip_norm)
    check(plan, execute(plan))


def test_the_masked_data_is_uneven(pairs: Path) -> None:
    """Else a mean of means would pass for the mean over all targets."""
    source = _source(_masked(pairs), pairs)
    counts = [int((source.batch(0, i).targets != IGNORED).sum()) for i in range(6)]
    assert len(set(counts)) > 2
    every = [source.batch(step, i).targets for step in range(3) for i in range(6)]
    assert any(bool((targets == IGNORED).all()) for targets in every)


def test_a_step_without_any_target_has_no_gradient(pairs: Path, tmp_path: Path) -> None:
    """Its loss is 0, its weights stay but for their decay; no NaN comes of dividing by nothing."""
    plan = _masked(pairs, clip_norm=1.0)
    with started(plan) as worker, pytest.MonkeyPatch.context() as patch:
        before = state_of(worker)
        tokens = worker._running().batches._source.data
        assert tokens.bits is not None
        patch.setattr(type(tokens), "counted", lambda *a: torch.zeros(a[2] - a[1]).bool().numpy())
        worker._running().batches.close()
        worker._running().compute.batches = type(worker._running().batches)(_source(plan, pairs))
        result = worker.step()
        worker.finish()
        assert result.loss == 0.0
        assert not result.skipped
        rule = plan.training.optimizer
        for old, new in zip(before, state_of(worker), strict=True):
            assert bool(new.weights.isfinite().all())
            moved = (new.weights - old.weights).abs()
            decay = rule.learning_rate * rule.weight_decay * old.weights.abs()
            assert bool((moved <= decay * 1.001 + 1e-8).all())


def _plain_loss(plan: Plan, worker: NativeWorker, source: BatchSource) -> float:
    """The mean over all targets, from the worker's weights, in fp64."""
    loop = loop_of(plan)
    loop.state = state_of(worker)
    leaves = loop._leaves()
    magnitudes = [torch.zeros(leaf.numel(), dtype=torch.float64) for leaf in leaves]
    total, targets = 0.0, 0
    for step in range(source.steps or 0):
        for number in range(source.micro_batches):
            batch = source.batch(step, number)
            total += float(loop._forward(leaves, magnitudes, batch.tokens, batch.targets).detach())
            targets += int((batch.targets != IGNORED).sum())
    return total / targets


def _validated(plan: Plan, data: Path, batches: int = 1000) -> Plan:
    validation = ValidationSpec(data=str(data), every=1, batches=batches)
    training = plan.training.model_copy(update={"validation": validation})
    return plan.model_copy(update={"training": training})


@given(plan=plans())
@settings(
    max_examples=examples(15),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_validation_is_right_and_leaves_training_alone(held_out: Path, plan: Plan) -> None:
    """After no step, one and two, and twice in a row; freed entries are filled with NaN."""
    plain, plan = execute(plan), _validated(plan, held_out)
    source = _source(plan, held_out, 1000)
    # bf16 weights and activations: the same numbers in the same order but for their sum.
    with started(plan) as worker:
        found = []
        for _ in range(len(plain.losses)):
            found.append(worker.evaluate())
            assert found[-1] == pytest.approx(_plain_loss(plan, worker, source), rel=1e-5)
            assert worker.evaluate() == found[-1]
            assert worker.step().loss == plain.losses[len(found) - 1]
        worker.evaluate()
        assert worker.finish().digest == plain.finished.digest


def test_training_moves_the_validation(held_out: Path, pairs: Path) -> None:
    plan = _validated(_masked(pairs, clip_norm=1.0), held_out)
    with started(plan) as worker:
        before = worker.evaluate()
        worker.step()
        assert worker.evaluate() < before


def test_a_validation_takes_no_more_batches_than_it_is_told(held_out: Path, pairs: Path) -> None:
    plan = _validated(_masked(pairs), held_out, batches=1)
    assert evaluated(plan) != evaluated(_validated(_masked(pairs), held_out))


def test_a_loss_in_chunks_is_the_loss(pairs: Path) -> None:
    """Chunks of 5 of 16 tokens, some of them without a target."""
    plan = _masked(pairs)
    whole, alone = execute(plan, steps=1), evaluated(plan)
    plan = plan.model_copy(
        update={"placement": plan.placement.model_copy(update={"loss_chunk": 5})}
    )
    assert execute(plan, steps=1).losses == pytest.approx(whole.losses, rel=1e-6)
    assert evaluated(plan) == pytest.approx(alone, rel=1e-6)


def test_an_evaluation_loads_what_is_streamed_and_changes_nothing(pairs: Path) -> None:
    with started(_masked(pairs, away=True)) as worker:
        ops = {action.op for action in expand(worker._program.evaluate)}
        before = state_of(worker)
        worker.evaluate()
        after = state_of(worker)
    assert ops == {Op.DATA, Op.LOOK_UP, Op.READ, Op.LOAD, Op.FORWARD, Op.FREE}
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.weights, new.weights)
