"""Plans whose optimizer state passes through the GPU, and what their updates must compute."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from bigplan.content import Content, Holds
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import KindPlacement, Placement, Share, StagePlacement, Tier
from bigplan.plan import Plan
from bigplan.program import Action, Lane, Op
from bigplan.runtime.context import Context
from bigplan.runtime.cpu.native import Piece
from bigplan.runtime.execution.executor import Executor
from bigplan.runtime.execution.lanes import ON_STREAMS
from bigplan.runtime.execution.update import _kernel
from bigplan.runtime.generated import adamw_for, adamw_step
from bigplan.runtime.optimizer.fused import fused_step
from bigplan.runtime.optimizer.scaling import Verdict
from bigplan.runtime.weights.homes import load
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.optimizer import rules
from tests.runtime.harness import context_of, state_of
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.runtime.reference import LayerState, State
from tests.toys import kind_placement

CHUNK = 20_000  # bytes: a quarter, 400 elements, passes at a time, of 9,300 in a block
ON_GPU = (Share.GPU, Share.STREAMED)  # what the GPU updates
CYCLES = 500_000  # of a GPU's clock, a third of a millisecond: longer than any action here
SECONDS = 0.001


def streamed_kind(
    parameters: Tier, gradients: Tier, streamed: float, layers: int = 1
) -> KindPlacement:
    """Layers with their state in host memory, a part of which passes through the GPU."""
    kind = kind_placement(layers, parameters, gradients, optimizer=Tier.HOST)
    return kind.model_copy(update={"streamed": streamed})


def everywhere(*, tied: bool = False, chunk: int = CHUNK) -> Placement:
    """Streamed rows beside all others, with parameters and gradients on either side each.

    Those of the head are streamed alone, the others' beside the CPU's; of the four blocks one has
    rows of every share but NVMe's and one has nothing but those.
    """
    block = KindPlacement(
        layers=4,
        parameters={Tier.GPU: 2, Tier.HOST: 1, Tier.NVME: 1},
        gradients={Tier.GPU: 1, Tier.HOST: 2, Tier.NVME: 1},
        activations={
            Recompute.NONE: {Tier.GPU: 1, Tier.HOST: 1},
            Recompute.MLP: {Tier.HOST: 1},
            Recompute.FULL: {Tier.HOST: 1},
        },
        optimizer={Tier.GPU: 0.5, Tier.HOST: 2.5, Tier.NVME: 1.0},
        streamed=1.75,
    )
    table = Tier.GPU if tied else Tier.HOST
    return placed(
        chunk=chunk,
        embedding=streamed_kind(table, Tier.GPU, 0.6),
        block=block,
        head=streamed_kind(Tier.GPU, Tier.HOST, 1.0),
    )


def streaming_plan(training: Mapping[str, object] | None = None, device: str = "cpu") -> Plan:
    """Two micro-batches a step, of which gradients in host memory are added up there.

    `training`: what differs from bf16 with clipping; "tied" is the model's.
    """
    changes = {"precision": "bf16", "clip_norm": 0.5, "tied": False, **(training or {})}
    model = tiny_model(layers=4, tied_embeddings=changes.pop("tied"))
    placement, strategy = everywhere(tied=model.tied_embeddings), Strategy(dp=1)
    return plan_of(model, tiny_training(2, **changes), strategy, placement, device)


def streaming_alone(tier: Tier, training: Mapping[str, object], device: str = "cpu") -> Plan:
    """A larger model of which all state is streamed, all parameters and gradients on `tier`."""
    kind = streamed_kind(tier, tier, 1.0)
    placement = placed(
        chunk=400_000, embedding=kind, block=streamed_kind(tier, tier, 2.0, layers=2), head=kind
    )
    model = tiny_model(hidden=256, ffn=512, vocab=1024)
    changes = {"precision": "bf16", "clip_norm": 0.5, **training}
    strategy = Strategy(dp=1, accumulation_group=2)
    return plan_of(model, tiny_training(2, **changes), strategy, placement, device)


def by_cpu(plan: Plan) -> Plan:
    """The same plan, but the CPU updates what is streamed."""
    (stage,) = plan.placement.stages
    kinds = {name: kind.model_copy(update={"streamed": 0.0}) for name, kind in stage.kinds.items()}
    changes = {"stages": (StagePlacement(kinds=kinds),)}
    return plan.model_copy(update={"placement": plan.placement.model_copy(update=changes)})


def slow(monkeypatch: pytest.MonkeyPatch, lane: Lane) -> None:
    """Whatever the lane does starts late, on the device where it has a stream."""
    run = Executor._run

    def late(self: Executor, action: Action) -> None:
        if action.lane is lane and action.op is not Op.FREE:
            if self._context.device.type == "cuda" and lane in ON_STREAMS:
                torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
            else:
                time.sleep(SECONDS)
        run(self, action)

    monkeypatch.setattr(Executor, "_run", late)


def expected_state(worker: NativeWorker) -> State:
    """The state after the updates that are pending, from what is at home now.

    Rows are updated by the kernels of whoever the plan says, each tensor in one piece: results do
    not depend on how an update is cut (tests/runtime/optimizer/test_fused.py).
    """
    verdict, context = worker._running().update.verdict, context_of(worker)
    assert verdict is not None
    before = state_of(worker)
    if verdict.skipped:
        return before
    return tuple(_expected(context, layer, old, verdict) for layer, old in enumerate(before))


def _expected(context: Context, layer: int, old: LayerState, verdict: Verdict) -> LayerState:
    new = [torch.full_like(tensor, torch.nan) for tensor in (old.weights, *old.moments)]
    dtype = context.gradient_dtype
    home = load(context, Content(Holds.GRADIENTS, layer))
    gradients = home[: old.weights.numel() * dtype.itemsize].view(dtype)
    by_device = {
        device: _updated(context, layer, old, gradients, verdict, device)
        for device in ("cpu", context.device.type)
    }
    for share, _, boxes in context.rows[layer].state:
        source = by_device[context.device.type if share in ON_GPU else "cpu"]
        for box in boxes:
            for target, tensor in zip(new, source, strict=True):
                target[box.in_layer] = tensor[box.in_layer]
    return LayerState(new[0], tuple(new[1:]))


def _updated(
    context: Context, layer: int, old: LayerState, gradients: Tensor, verdict: Verdict, device: str
) -> list[Tensor]:
    """The whole layer's weights and moments, computed on a device."""
    tensors = [tensor.clone().to(device) for tensor in (old.weights, *old.moments)]
    divided, optimizer = gradients.clone().to(device), context.training.optimizer
    by_name = rules(optimizer, context.model, layer)
    generated = adamw_for(context.training, context.device)
    for name, (start, rows, columns) in context.rows[layer].offsets.items():
        gradient, *values = (t[start : start + rows * columns] for t in (divided, *tensors))
        piece = Piece(values[0], gradient, tuple(values[1:]))
        kernel = _kernel(optimizer, verdict, by_name[name])
        if generated is not None and device == "cuda":
            constants = kernel.native.constants
            factors = generated.factors(constants, verdict.divisor, piece.gradient.device)
            adamw_step(generated, factors, [piece])
        else:
            fused_step([piece], kernel, verdict.divisor)
    return [tensor.cpu() for tensor in tensors]
