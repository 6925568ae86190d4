"""On a GPU the same plans train as the plain loop does on the CPU, within its rounding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("torch")

import torch

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.spec.training import LossScale
from tests.examples import examples
from tests.runtime.harness import execute, loop_of
from tests.runtime.plans import placed, plan_of, plans, tiny_model, tiny_training
from tests.runtime.rounding import BF16_LOSS, check_within_rounding
from tests.toys import kind_placement

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def _plain_fp32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    yield
    torch.set_float32_matmul_precision(before)


@given(plans(precisions=("fp32",), device="cuda"))
@settings(
    max_examples=examples(25),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_fp32_plan_trains_as_a_plain_loop_does(plan: Plan) -> None:
    check_within_rounding(plan, execute(plan))


def test_an_fp32_plan_with_grouped_heads_keeps_what_was_counted() -> None:
    model, training = tiny_model(max_sequence_length=256), tiny_training(1, sequence_length=256)
    block = kind_placement(2, activations=(Recompute.NONE, Tier.HOST))
    placement = placed(embedding=kind_placement(1), block=block, head=kind_placement(1))
    plan = plan_of(model, training, Strategy(dp=1), placement, "cuda")
    check_within_rounding(plan, execute(plan))


@given(plans(precisions=("bf16",), device="cuda"))
@settings(
    max_examples=examples(20),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_bf16_losses_stay_near_the_plain_loops(plan: Plan) -> None:
    loop = loop_of(plan)
    for loss in execute(plan).losses:
        assert loss == pytest.approx(loop.step().loss, rel=BF16_LOSS)


@pytest.mark.parametrize("gradients", ["fp32", "fp16"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_fp16_losses_stay_near_the_plain_loops(gradients: str, clip_norm: float | None) -> None:
    block = kind_placement(2, optimizer=Tier.HOST)
    placement = placed(embedding=kind_placement(1), block=block, head=kind_placement(1))
    training = tiny_training(
        4,
        precision="fp16",
        gradient_precision=gradients,
        clip_norm=clip_norm,
        loss_scale=LossScale(initial=1024),
    )
    plan = plan_of(tiny_model(), training, Strategy(dp=1), placement, "cuda")
    run, loop = execute(plan), loop_of(plan)
    assert not any(result.skipped for result in run.results)
    for loss in run.losses:
        assert loss == pytest.approx(loop.step().loss, rel=BF16_LOSS)


@given(plans(device="cuda"))
@settings(max_examples=examples(5), derandomize=True, deadline=None)
def test_the_same_plan_gives_the_same_losses_again(plan: Plan) -> None:
    """Attention's backward and the embedding's add in any order, so not the same bits."""
    first, second = execute(plan), execute(plan)
    assert first.losses == pytest.approx(second.losses, rel=BF16_LOSS)
