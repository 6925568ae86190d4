"""Loss scale, clip divisor and skipped steps, against torch's GradScaler and clip_grad_norm_."""

from __future__ import annotations

from math import inf, nan

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from bigplan.runtime.optimizer.scaling import Scaling
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.schedule import Schedule
from bigplan.spec.training import LossScale, Training


def _training(**changes: object) -> Training:
    fields: dict[str, object] = {"sequence_length": 8, "global_batch": 1, "precision": "fp16"}
    return Training.model_validate(fields | changes)


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_the_scale_moves_as_torchs_does(good: list[bool], interval: int) -> None:
    initial = 2.0**30  # far enough above one
    scale = LossScale(initial=initial, growth_interval=interval)
    scaling = Scaling(_training(loss_scale=scale))
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=interval)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step, fine in enumerate(good, start=1):
        assert scaling.scale == scaler.get_scale()
        weight.grad = scaler.scale(torch.ones(1) if fine else torch.full((1,), inf))
        verdict = scaling.judge(step, float(weight.grad))
        scaler.step(optimizer)
        scaler.update()
        assert verdict.skipped == (not fine)
        assert verdict.number == sum(good[:step])
        assert verdict.loss_scale is not None
    assert scaling.scale == scaler.get_scale()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("limit", [0.5, 100.0, None])
def test_gradients_are_clipped_as_torch_does(precision: str, limit: float | None) -> None:
    training = _training(precision=precision, clip_norm=limit)
    scaling = Scaling(training)
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    scaled = gradient * scaling.scale
    verdict = scaling.judge(1, float(scaled.norm()))
    assert verdict.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-6)
    parameter = torch.nn.Parameter(torch.zeros(1000))
    parameter.grad = gradient.clone()
    if limit is not None:
        torch.nn.utils.clip_grad_norm_([parameter], limit)
    # A factor of one is exact, so is a division by a power of two; otherwise two roundings.
    clips = limit is not None and limit < 30
    assert torch.allclose(
        scaled / verdict.divisor, parameter.grad, rtol=3e-7 if clips else 0.0, atol=0.0
    )


@pytest.mark.parametrize("norm", [inf, nan])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_bad_step_is_skipped(precision: str, norm: float) -> None:
    scaling = Scaling(_training(precision=precision))
    for step in range(1, 30):
        verdict = scaling.judge(step, norm)
        assert (verdict.skipped, verdict.gradient_norm, verdict.number) == (True, None, 0)
    assert scaling.judge(30, 1.0).number == 1


def test_fp16_scales_down_to_one_at_most() -> None:
    scaling = Scaling(_training(loss_scale=LossScale(initial=2.0**20)))
    assert [scaling.judge(step, inf).loss_scale for step in range(1, 24)] == [
        *(2.0**power for power in range(20, 0, -1)), 1.0, 1.0, 1.0
    ]  # fmt: skip


def test_the_rate_is_that_of_the_step_and_counts_skipped_ones() -> None:
    training = _training(
        precision="bf16", optimizer=Optimizer(learning_rate=1.0), schedule=Schedule(warmup_steps=4)
    )
    scaling = Scaling(training)
    verdicts = [scaling.judge(step, nan if step == 2 else 1.0) for step in (1, 2, 3)]
    assert [verdict.learning_rate for verdict in verdicts] == [0.25, 0.5, 0.75]
    assert [verdict.number for verdict in verdicts] == [1, 1, 2]


@given(st.lists(st.sampled_from((1.0, inf)), max_size=20), st.integers(0, 20))
def test_a_restored_state_goes_on_alike(norms: list[float], cut: int) -> None:
    training = _training(loss_scale=LossScale(initial=2.0**30, growth_interval=3))
    whole = Scaling(training)
    expected = [whole.judge(step, norm) for step, norm in enumerate(norms, start=1)]
    first, second = Scaling(training), Scaling(training)
    for step, norm in enumerate(norms[:cut], start=1):
        first.judge(step, norm)
    second.restore(first.state())
    later = [second.judge(step, norm) for step, norm in enumerate(norms, start=1) if step > cut]
    assert later == expected[cut:]
    assert second.state() == whole.state()
