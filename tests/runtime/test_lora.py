"""Runs that train adapters beside a frozen model compute what a plain torch loop computes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.content import ADAPTERS
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import KindPlacement, Placement, Tier
from bigplan.plan import Plan
from bigplan.runtime.context import Context
from bigplan.runtime.weights import stage_adapters
from bigplan.runtime.worker import NativeWorker
from tests.runtime.harness import context_of, started
from tests.runtime.lora_loop import LoraLoop
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training

STEPS = 4
CLOSE = 1e-5  # fp32, sums in another order
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def frozen(
    layers: int,
    parameters: Tier = Tier.GPU,
    recompute: Recompute = Recompute.NONE,
    activations: Tier = Tier.GPU,
) -> KindPlacement:
    """Frozen layers of one kind, all alike."""
    return KindPlacement(
        layers=layers,
        parameters={parameters: layers},
        activations={recompute: {activations: layers}},
    )


def plan(
    placement: Placement | None = None, strategy: Strategy | None = None, **training: object
) -> Plan:
    """Two blocks; all on the GPU unless placed elsewhere."""
    given = {"lora": LORA, **training}
    return plan_of(
        tiny_model(),
        tiny_training(4, **given),
        strategy or Strategy(dp=1, accumulation_group=2),
        placement or placed(embedding=frozen(1), block=frozen(2), head=frozen(1)),
    )


def adapters_of(worker: NativeWorker) -> dict[str, Tensor]:
    """By name in the model, as this rank has them."""
    context = context_of(worker)
    return _named(context, stage_adapters(context))


def _named(context: Context, flat: Tensor) -> dict[str, Tensor]:
    return {
        name: flat[start : start + rows * columns].view(rows, columns).clone()
        for name, (start, rows, columns) in context.offsets[ADAPTERS].items()
    }


def check_steps(found: Plan, steps: int = STEPS) -> None:
    """Losses and adapters of every step are the plain loop's."""
    loop = LoraLoop(found)
    with started(found) as worker:
        for name, value in adapters_of(worker).items():
            assert torch.equal(value, loop.adapters[name].detach()), name
        for _ in range(steps):
            assert worker.step().loss == pytest.approx(loop.step(), rel=CLOSE)
        worker.finish()
        for name, value in adapters_of(worker).items():
            exact = loop.adapters[name].detach()
            assert float((value - exact).norm()) < 10 * CLOSE * float(exact.norm()), name


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_a_resident_run_is_the_plain_loop(clip_norm: float | None) -> None:
    check_steps(plan(clip_norm=clip_norm))


AWAY = {
    "host": placed(
        embedding=frozen(1, Tier.HOST), block=frozen(2, Tier.HOST), head=frozen(1, Tier.HOST)
    ),
    "nvme": placed(
        embedding=frozen(1), block=frozen(2, Tier.NVME), head=frozen(1, Tier.HOST), slots=2
    ),
    "activations": placed(
        embedding=frozen(1),
        block=frozen(2, Tier.HOST, Recompute.NONE, Tier.HOST),
        head=frozen(1),
    ),
}


@pytest.mark.parametrize("name", AWAY)
@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_frozen_weights_may_be_elsewhere(name: str, clip_norm: float | None) -> None:
    check_steps(plan(AWAY[name], clip_norm=clip_norm))


@pytest.mark.parametrize("recompute", list(Recompute), ids=str)
@pytest.mark.parametrize("activations", [Tier.GPU, Tier.HOST])
def test_blocks_may_be_recomputed(recompute: Recompute, activations: Tier) -> None:
    block = frozen(2, Tier.HOST, recompute, activations)
    check_steps(plan(placed(embedding=frozen(1), block=block, head=frozen(1))))
