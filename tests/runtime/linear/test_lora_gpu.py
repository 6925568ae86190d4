"""Adapters on a GPU: the plain loop's losses, and the same bits wherever frozen weights are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.runtime.weights.digest import stage_adapters
from tests.runtime.harness import context_of, started
from tests.runtime.linear.lora_loop import LoraLoop
from tests.runtime.linear.lora_ranks import LORA, frozen
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.runtime.rounding import BF16_LOSS

pytestmark = pytest.mark.gpu

BLOCKS, STEPS = 3, 5
DROPS = {**LORA, "dropout": 0.3}
CLOSE = 1e-5  # fp32, sums in another order


@pytest.fixture(autouse=True, scope="module")
def _plain_fp32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    yield
    torch.set_float32_matmul_precision(before)


def _plan(
    recompute: Recompute = Recompute.NONE,
    parameters: Tier = Tier.GPU,
    activations: Tier = Tier.GPU,
    *,
    captured: bool = False,
    **training: object,
) -> Plan:
    """Two micro-batches a step, clipped."""
    block = frozen(BLOCKS, parameters, recompute, activations)
    placement = placed(embedding=frozen(1), block=block, head=frozen(1))
    settings = {"precision": "bf16", "clip_norm": 0.5, "deterministic": True, "lora": LORA}
    model = tiny_model(layers=BLOCKS, qk_norm=True)
    return plan_of(
        model,
        tiny_training(2, **{**settings, **training}),
        Strategy(dp=1),
        placement.model_copy(update={"captured": captured}),
        "cuda",
    )


def _run(plan: Plan) -> tuple[list[float], Tensor, int]:
    """Losses, the adapters at the end, and how many passes have graphs."""
    with started(plan) as worker:
        losses = [worker.step().loss for _ in range(STEPS)]
        graphs = len(worker._running().executor._graphs._passes)
        worker.finish()
        return losses, stage_adapters(context_of(worker)), graphs


@pytest.mark.parametrize("kernels", ["generated", "torch"])
@pytest.mark.parametrize("recompute", list(Recompute), ids=str)
@pytest.mark.parametrize("lora", [LORA, DROPS], ids=["all", "dropout"])
def test_an_fp32_run_is_the_plain_loop(
    recompute: Recompute, kernels: str, lora: dict[str, object]
) -> None:
    plan = _plan(recompute, Tier.HOST, precision="fp32", kernels=kernels, lora=lora)
    loop = LoraLoop(plan)
    losses, _, _ = _run(plan)
    assert losses == pytest.approx([loop.step() for _ in losses], rel=CLOSE)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("narrow", [False, True])
def test_16_bit_losses_stay_near_the_plain_loops(precision: str, *, narrow: bool) -> None:
    gradients = precision if narrow else "fp32"
    plan = _plan(precision=precision, gradient_precision=gradients, clip_norm=None)
    loop = LoraLoop(plan)
    losses, _, _ = _run(plan)
    assert losses == pytest.approx([loop.step() for _ in losses], rel=BF16_LOSS)


@pytest.mark.parametrize("recompute", list(Recompute), ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_frozen_experts_stay_near_the_plain_loop(recompute: Recompute, *, packed: bool) -> None:
    """By torch's grouped products in bf16, of matrices in 16 or 4 bits."""
    lora = {**LORA, "frozen": "nf4"} if packed else LORA
    plan = _plan(recompute, Tier.HOST, lora=lora)
    shapes = {"hidden": 128, "ffn": 64, "experts": 4, "experts_per_token": 2}
    model = plan.model.model_copy(update=shapes | {"head_dim": 32})
    plan = plan.model_copy(update={"model": model})
    loop = LoraLoop(plan)
    losses, _, _ = _run(plan)
    assert losses == pytest.approx([loop.step() for _ in losses], rel=BF16_LOSS)


@pytest.mark.parametrize("recompute", list(Recompute), ids=str)
@pytest.mark.parametrize("lora", [LORA, DROPS], ids=["all", "dropout"])
def test_graphs_repeat_the_bits(recompute: Recompute, lora: dict[str, object]) -> None:
    """And have the masks of the step under way, where something is dropped."""
    losses, adapters, _ = _run(_plan(recompute, lora=lora))
    again, same, graphs = _run(_plan(recompute, captured=True, lora=lora))
    assert graphs == 2 * 2 * BLOCKS
    assert (losses, torch.equal(adapters, same)) == (again, True)


@pytest.mark.parametrize(
    ("parameters", "activations"),
    [(Tier.HOST, Tier.GPU), (Tier.NVME, Tier.GPU), (Tier.HOST, Tier.HOST)],
)
def test_frozen_weights_give_the_same_bits_from_anywhere(
    parameters: Tier, activations: Tier
) -> None:
    losses, adapters, _ = _run(_plan())
    again, same, _ = _run(_plan(Recompute.NONE, parameters, activations))
    assert (losses, torch.equal(adapters, same)) == (again, True)
