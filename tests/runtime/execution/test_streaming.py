"""State that passes through the GPU is updated as where it lives, whoever is late on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from bigplan.placement import Share, Tier
from bigplan.program import Lane, Op, expand
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.optimizer import Optimizer, ParameterGroup
from bigplan.spec.training import LossScale
from tests.runtime.checkpoints import course, running
from tests.runtime.execution.streamed import (
    by_cpu,
    expected_state,
    slow,
    streaming_alone,
    streaming_plan,
)
from tests.runtime.harness import check, context_of, execute, loop_of, same, started, state_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SGD = Optimizer(name="sgd", learning_rate=0.5, momentum=0.0, weight_decay=0.01)
# Of a table that is looked up and gives scores: at 0.5 the rounding of norms' gradients to bf16
# alone moves the third step's loss by up to 4%, at 0.2 by 0.05%.
SLOWER = SGD.model_copy(update={"learning_rate": 0.2})
MOMENTUM = SGD.model_copy(update={"momentum": 0.9})
GROUPS = (
    ParameterGroup(match="*norm*", weight_decay=0.3, learning_rate_factor=0.5),
    ParameterGroup(match="layers.*.q_proj.*", weight_decay=0.0),
)
GROUPED = MOMENTUM.model_copy(update={"groups": GROUPS})
NARROW_BF16: dict[str, object] = {"precision": "bf16", "gradient_precision": "bf16"}
NARROW_FP16: dict[str, object] = {"precision": "fp16", "gradient_precision": "fp16"}
STILL: dict[str, object] = {"loss_scale": LossScale(initial=1024)}
WAITING: dict[str, dict[str, object]] = {  # updates wait for the norm
    "bf16": {},
    "bf16-sgd": {"optimizer": SGD},
    "bf16-grouped": {"optimizer": GROUPED},
    "narrow-bf16-tied-momentum": {**NARROW_BF16, "optimizer": MOMENTUM, "tied": True},
    "fp16": {"precision": "fp16", "clip_norm": None, **STILL},
    "fp16-overflow": {"precision": "fp16", "loss_scale": LossScale(initial=2.0**40)},
    "narrow-fp16-unclipped-momentum": {
        **NARROW_FP16,
        **STILL,
        "clip_norm": None,
        "optimizer": MOMENTUM,
    },
    "fp32": {"precision": "fp32"},
}
AT_ONCE: dict[str, dict[str, object]] = {  # updates run within the backward
    "bf16": {"clip_norm": None},
    "narrow-bf16-grouped": {**NARROW_BF16, "clip_norm": None, "optimizer": GROUPED},
    "bf16-sgd-tied": {"clip_norm": None, "optimizer": SLOWER, "tied": True},
    "fp32-momentum": {"precision": "fp32", "clip_norm": None, "optimizer": MOMENTUM},
}
EVERY = WAITING | {f"{name}-at-once": training for name, training in AT_ONCE.items()}
LANES = (
    Lane.STATE_IN,
    Lane.GPU_UPDATE,
    Lane.STATE_OUT,
    Lane.COMPUTE,
    Lane.CPU,
    Lane.H2D,
    Lane.D2H,
    Lane.NVME_READ,
    Lane.NVME_WRITE,
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_the_plans_here_stream_rows_of_every_home() -> None:
    """Else the others would test less than they say."""
    with started(streaming_plan()) as worker:
        program = worker._program
        found = {
            (at.parameters, at.gradients, *(share for share in Share if at.rows[share] > 0))
            for at in program.layers.values()
        }
        assert found == {
            (Tier.HOST, Tier.GPU, Share.STREAMED, Share.HOST),
            (Tier.GPU, Tier.GPU, Share.GPU, Share.STREAMED, Share.HOST, Share.NVME),
            (Tier.GPU, Tier.HOST, Share.STREAMED, Share.HOST, Share.NVME),
            (Tier.HOST, Tier.HOST, Share.STREAMED, Share.HOST, Share.NVME),
            (Tier.NVME, Tier.NVME, Share.HOST, Share.NVME),
            (Tier.GPU, Tier.HOST, Share.STREAMED),
        }
        chunks = sum(action.op is Op.STATE_IN for action in expand(program.step))
        assert chunks > 10 * program.buffers["stream"].count


@pytest.mark.parametrize("name", EVERY)
def test_streaming_computes_what_the_cpu_does_and_a_plain_loop(name: str) -> None:
    """Bit by bit, on a device that is a CPU itself."""
    plan = streaming_plan(EVERY[name])
    ours, theirs = execute(plan), execute(by_cpu(plan))
    assert ours.losses == theirs.losses
    assert ours.finished.digest == theirs.finished.digest
    for number, (one, two) in enumerate(zip(ours.states, theirs.states, strict=True)):
        same(f"step {number}", two, one)
    check(plan, ours)


def _updates_are_right(worker: NativeWorker) -> list[bool]:
    """Updates beside a forward, then alone, then again; which of them were skipped."""
    skipped = [worker.step().skipped]
    for beside in (True, False, True, False):
        expected = expected_state(worker)
        if beside:
            skipped.append(worker.step().skipped)
        else:
            worker._flush()
        same("beside a forward" if beside else "in a flush", expected, state_of(worker))
        if not beside:
            skipped.append(worker.step().skipped)
    return skipped


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("fp16-overflow", "cpu"),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in WAITING),
    ],
)
def test_every_row_is_updated_from_its_gradient(name: str, device: str) -> None:
    """Bit by bit on a GPU too: compared is an update, from gradients that are there.

    On a CPU the plain loop has all of them, and late lanes those that are not skipped.
    """
    with started(streaming_plan(WAITING[name], device)) as worker:
        skipped = _updates_are_right(worker)
    assert any(skipped) == (name == "fp16-overflow")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("precision", "lane"),
    [*(("bf16", lane) for lane in LANES), ("fp32", Lane.STATE_OUT)],
)
def test_no_lane_is_overtaken(
    monkeypatch: pytest.MonkeyPatch, device: str, precision: str, lane: Lane
) -> None:
    """Each of them late in turn, entries that are freed full of NaN."""
    slow(monkeypatch, lane)
    with started(streaming_plan({"precision": precision}, device)) as worker:
        assert not any(_updates_are_right(worker))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("precision", "lane"),
    [
        *(("bf16", lane) for lane in (Lane.GPU_UPDATE, Lane.STATE_OUT, Lane.CPU, Lane.H2D)),
        ("fp32", Lane.STATE_OUT),
    ],
)
def test_no_forward_is_early(
    monkeypatch: pytest.MonkeyPatch, device: str, precision: str, lane: Lane
) -> None:
    """Its loss is that of the updated weights: on a GPU within its rounding (test_gpu.py)."""
    slow(monkeypatch, lane)
    plan = streaming_plan({"precision": precision}, device)
    run, loop = execute(plan), loop_of(plan)
    within = {"cpu": 0.0, "cuda": 0.01 if precision == "bf16" else 1e-5}[device]
    for result, before in zip(run.results, run.states[:-1], strict=True):
        loop.state = before
        assert result.loss == pytest.approx(loop.step().loss, rel=within, abs=0.0)


@pytest.mark.parametrize(
    ("lane", "name", "device"),
    [
        (Lane.STATE_IN, "bf16", "cpu"),
        (Lane.STATE_OUT, "bf16", "cpu"),
        (Lane.STATE_OUT, "narrow-bf16-grouped", "cpu"),
        *(
            pytest.param(lane, name, "cuda", marks=pytest.mark.gpu)
            for lane in (Lane.STATE_IN, Lane.STATE_OUT)
            for name in AT_ONCE
        ),
    ],
)
def test_updates_within_the_backward_train(
    monkeypatch: pytest.MonkeyPatch, lane: Lane, name: str, device: str
) -> None:
    """Losses follow the plain loop's, as tests/runtime/test_gpu.py has it: 1% in 16 bits.

    Without late lanes the first test has all of them, bit by bit.
    """
    slow(monkeypatch, lane)
    plan = streaming_plan(AT_ONCE[name], device)
    loop = loop_of(plan)
    for loss in execute(plan).losses:
        assert loss == pytest.approx(loop.step().loss, rel=0.01)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "lane"),
    [
        *(("bf16", lane) for lane in (*LANES[:3], Lane.CHECKPOINT)),
        ("narrow-bf16-tied-momentum", Lane.STATE_OUT),
        ("fp32", Lane.STATE_OUT),
        ("fp32", Lane.CHECKPOINT),
    ],
)
def test_a_checkpoint_has_the_chunks_of_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, name: str, lane: Lane
) -> None:
    """Written while the next step's may be on their way; read by plans that stream, and not.

    Where it was late itself, they go on from each other's; of others one reads the first.
    """
    slow(monkeypatch, lane)
    plan = streaming_plan(WAITING[name], device)
    with running(plan) as (worker, _):
        worker.step()
        expected = expected_state(worker)
        worker.step(tmp_path)
        worker.step()
        worker.finish()
    monkeypatch.undo()
    path = tmp_path / "step-000001"
    in_turn = (plan, by_cpu(plan), plan) if lane is Lane.CHECKPOINT else (by_cpu(plan),)
    for number, other in enumerate(in_turn, start=1):
        with running(other, path) as (worker, done):
            assert done == number
            same(f"step {number}", expected, state_of(worker))
            worker.step()
            same("its updates wait", expected, state_of(worker))
            expected = expected_state(worker)
            path = worker.save(tmp_path)
    if device == "cuda":  # gradients need not be the same bits again
        return
    whole = course(plan, 1 + len(in_turn))
    same("the last step", whole.state, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tier", "gradients"), [(Tier.GPU, "fp32"), (Tier.HOST, "bf16")])
def test_state_may_be_streamed_alone(device: str, tier: Tier, gradients: str) -> None:
    plan = streaming_alone(tier, {"gradient_precision": gradients}, device)
    with started(plan) as worker:
        assert Lane.CPU not in {a.lane for a in expand(worker._program.flush)}
        assert not any(_updates_are_right(worker))


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [Optimizer(), MOMENTUM], ids=["adamw", "momentum"])
def test_updates_take_no_memory_but_a_chunks_wide_gradients(
    gradients: str, optimizer: Optimizer
) -> None:
    """Of 16 bits, one chunk at a time is cast to fp32; beside it are scalars, 512 bytes each."""
    training = {"gradient_precision": gradients, "optimizer": optimizer}
    plan = streaming_alone(Tier.HOST, training, "cuda")
    with started(plan) as worker:
        worker.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, context = torch.cuda.memory_allocated(), context_of(worker)
        worker._flush()
        chunks = [boxes for rows in context.rows.values() for boxes in rows.chunks[Share.STREAMED]]
        widest = max(sum(box.count for box in boxes) for boxes in chunks)
        scalars = 512 * (2 + max(len(boxes) for boxes in chunks))
        allowed = scalars + (0 if gradients == "fp32" else 4 * widest + 512)
        assert torch.cuda.max_memory_allocated() - before <= allowed
