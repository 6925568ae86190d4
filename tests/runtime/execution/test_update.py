"""Norm, clip, loss scale and skipped steps with updates that lie wherever the plan puts them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf, isfinite, isnan, nan

import pytest

pytest.importorskip("torch")

import torch
from torch.profiler import ProfilerActivity, profile

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement, StagePlacement, Tier
from bigplan.plan import Plan
from bigplan.program import Action, Op
from bigplan.runtime.execution import compute
from bigplan.runtime.memory.pieces import Box, merged
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.schedule import Schedule
from bigplan.spec.training import LossScale
from tests.runtime.checkpoints import on_device
from tests.runtime.harness import check, execute, loop_of, same, started, state_of
from tests.runtime.plans import OPTIMIZER, placed, plan_of, tiny_model, tiny_training
from tests.toys import kind_placement

STRATEGY = Strategy(dp=1, accumulation_group=2)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def _resident() -> Placement:
    return placed(embedding=kind_placement(1), block=kind_placement(2), head=kind_placement(1))


def _spread(chunk: int = 30_000) -> Placement:
    """Nothing stays on the GPU but a part of a block's rows."""
    away = kind_placement(1, Tier.HOST, Tier.HOST, (Recompute.NONE, Tier.HOST), Tier.HOST)
    head = kind_placement(1, Tier.NVME, Tier.NVME, optimizer=Tier.NVME)
    rows = {Tier.GPU: 0.25, Tier.HOST: 0.75, Tier.NVME: 1.0}
    block = kind_placement(2).model_copy(update={"optimizer": rows, "streamed": 0.5})
    return placed(chunk=chunk, embedding=away, block=block, head=head)


def _plan(placement: Placement, **training: object) -> Plan:
    return plan_of(tiny_model(), tiny_training(4, **training), STRATEGY, placement)


def _inject(monkeypatch: pytest.MonkeyPatch, bad: dict[int, float], layer: int = 1) -> None:
    """Put a value into one gradient of `layer` in the given steps, counted from 0."""
    plain = compute.Compute.backward

    def injecting(self: compute.Compute, action: Action) -> None:
        plain(self, action)
        if action.layer == layer and action.micro_batch == 1 and self.step in bad:
            context = self._context
            total = context.entries.flat(action.writes[0], action, context.gradient_dtype)
            _, tensor, *_ = context.views(total, layer).values()
            tensor.view(-1)[3] = bad[self.step]

    monkeypatch.setattr(compute.Compute, "backward", injecting)


SKIPPING = [
    {"precision": "fp32", "clip_norm": 0.5},
    {"precision": "bf16", "clip_norm": 0.5},
    {"precision": "fp16", "clip_norm": 0.5},
    {"precision": "fp16", "clip_norm": None},
    {"precision": "fp16", "clip_norm": None, "gradient_precision": "fp16"},
    {"precision": "bf16", "clip_norm": 0.5, "optimizer": Optimizer(name="sgd", learning_rate=0.5)},
]


@pytest.mark.parametrize(
    ("placement", "training"),
    [(_resident(), SKIPPING[0]), *((_spread(), training) for training in SKIPPING)],
)
def test_a_step_with_a_bad_gradient_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, placement: Placement, training: dict[str, object]
) -> None:
    """Neither weights nor moments; the loss scale falls after it."""
    _inject(monkeypatch, {0: nan, 2: inf})
    run = execute(_plan(placement, **training), steps=5)
    assert [result.skipped for result in run.results] == [True, False, True, False, False]
    assert [result.gradient_norm is None for result in run.results] == [
        result.skipped for result in run.results
    ]
    for number in (0, 2):
        same(f"step {number + 1}", run.states[number], run.states[number + 1])
    scales = [result.loss_scale for result in run.results]
    halved = [65536.0, 32768.0, 32768.0, 16384.0, 16384.0]
    assert scales == (halved if training["precision"] == "fp16" else [None] * 5)


@pytest.mark.parametrize("training", SKIPPING)
def test_after_a_skipped_step_the_plain_loop_goes_on_alike(
    monkeypatch: pytest.MonkeyPatch, training: dict[str, object]
) -> None:
    """Bias correction counts updates, not steps; batches and rates follow the steps."""
    schedule = Schedule(name="cosine", warmup_steps=1, decay_steps=8)
    plan = _plan(_resident(), **training, schedule=schedule)
    _inject(monkeypatch, {1: inf})
    run, loop = execute(plan, steps=4), loop_of(plan)
    for number, result in enumerate(run.results):
        loop.state = run.states[number]
        with monkeypatch.context() as patch:
            if number == 1:
                gradients, magnitudes, loss = loop._gradients()
                gradients[1][0] = nan
                spoilt = gradients, magnitudes, loss
                patch.setattr(loop, "_gradients", partial(tuple, spoilt))
            outcome = loop.step()
        assert (result.loss, result.learning_rate) == (outcome.loss, outcome.learning_rate)
        for bound, ours, plain in zip(
            outcome.bounds, run.states[number + 1], outcome.state, strict=True
        ):
            expected = plain.tensors()
            for name, tensor in ours.tensors().items():
                allowed = 0.0 if bound is None else bound.tensors()[name]
                off = (tensor.double() - expected[name].double()).abs()
                assert bool((off <= allowed).all()), (number, name)


def test_fp16_finds_its_scale() -> None:
    """From a scale at which gradients overflow down to one at which they do not."""
    plan = _plan(_spread(), precision="fp16", loss_scale=LossScale(initial=2.0**26))
    run = execute(plan, steps=8)
    skipped = [result.skipped for result in run.results]
    assert 1 <= sum(skipped) <= 7
    scale = 2.0**26
    for result in run.results:
        assert result.loss_scale == scale
        scale /= 2 if result.skipped else 1
    assert check(plan, run) > 0
    assert all(isfinite(loss) for loss in run.losses)


def test_a_growing_scale_changes_no_weight() -> None:
    """Powers of two scale and unscale exactly, unless something underflows or overflows."""
    still = LossScale(initial=1024.0)
    growing = LossScale(initial=1024.0, growth_interval=1)
    options = {"precision": "fp16", "clip_norm": None}
    first = execute(_plan(_resident(), **options, loss_scale=still))
    second = execute(_plan(_resident(), **options, loss_scale=growing))
    assert [result.loss_scale for result in second.results] == [1024.0, 2048.0, 4096.0]
    assert first.losses == pytest.approx(second.losses, rel=1e-3)  # subnormals are rounded


def test_bad_steps_change_nothing_and_tell_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    _inject(monkeypatch, dict.fromkeys(range(12), nan))
    with started(_plan(_resident(), precision="bf16", clip_norm=1.0)) as worker:
        before = state_of(worker)
        for _ in range(12):  # who drives the steps ends them: launcher/steps.py
            result = worker.step()
            assert result.skipped
            assert result.not_finite == (1,)
        same("weights", before, state_of(worker))


def test_without_a_norm_a_bad_loss_is_no_skipped_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _inject(monkeypatch, {0: nan})
    with started(_plan(_resident(), clip_norm=None)) as worker:
        worker.step()  # its own loss came before the bad gradient
        after = worker.step()  # who drives the steps ends them: launcher/steps.py
    assert isnan(after.loss)
    assert not after.skipped


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("placement", [_resident(), _spread()], ids=["resident", "spread"])
def test_the_norm_counts_every_parameter_once(tied: bool, placement: Placement) -> None:
    """A tied table too, whose gradient is the sum over both uses."""
    if tied:
        kinds = dict(placement.stages[0].kinds)
        kinds["embedding"] = kind_placement(1, optimizer=Tier.HOST)
        placement = Placement(stages=(StagePlacement(kinds=kinds),), chunk=30_000)
    model = tiny_model(tied_embeddings=tied)
    training = tiny_training(4, clip_norm=0.5, optimizer=OPTIMIZER)
    plan = plan_of(model, training, STRATEGY, placement)
    run = execute(plan, steps=1)
    gradients, _, _ = loop_of(plan)._gradients()
    assert sum(gradient.numel() for gradient in gradients) == model.parameter_count
    whole = float(torch.cat(gradients).double().norm())
    assert run.results[0].gradient_norm == pytest.approx(whole, rel=1e-5)


def test_norms_of_a_gpu_s_parts_are_squared_where_the_step_is_clipped() -> None:
    """In fp64, in which squares of fp32's largest norms are finite."""
    with started(_plan(_resident(), clip_norm=0.5)) as worker:
        update = worker._running().update
        parts = [torch.tensor(each) for each in (3.0, 4.0)]
        update._norms = {2: parts, 0: 2.5, 1: [torch.tensor(1e30)]}
        assert update._squares() == {2: 25.0, 0: 2.5, 1: pytest.approx(1e60, rel=1e-6)}
        assert update._squares() == {}


@pytest.mark.gpu
def test_a_norm_on_a_gpu_is_one_kernel_a_layer() -> None:
    plan = on_device(_plan(_resident(), clip_norm=0.5), "cuda")
    with started(plan) as worker:
        worker.step()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            result = worker.step()
    norms = [event for event in result.timeline.events if event.op == Op.NORM.value]
    kernels = [one for one in found.key_averages() if "NormTwoOps" in one.key]
    assert sum(one.count for one in kernels) == len(norms) == 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_keeps_no_more_state_than_it_needs(precision: str, momentum: float) -> None:
    optimizer = Optimizer(name="sgd", learning_rate=0.5, momentum=momentum)
    plan = _plan(_spread(5_000), precision=precision, optimizer=optimizer)
    with started(plan) as worker:
        buffers = worker._program.buffers.values()
        state = sum(b.total for b in buffers if b.purpose == "optimizer")
    parts = (precision != "fp32") + (momentum > 0)
    assert state >= 4 * parts * plan.model.parameter_count
    assert (state == 0) == (parts == 0)
    check(plan, execute(plan))


def test_boxes_that_follow_each_other_are_one() -> None:
    at = [("a", 0, 4, 0), ("b", 4, 6, 4), ("c", 12, 3, 10), ("d", 15, 1, 20)]
    boxes = [Box(*one, owned=one[1]) for one in at]
    assert list(merged(boxes)) == [replace(boxes[0], count=10), *boxes[2:]]
    assert list(merged([])) == []
