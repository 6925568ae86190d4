"""Plans whose moments are stored in fewer bits, and processes that run them and go on."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.plan import Plan
from bigplan.runtime.checkpoint import latest
from bigplan.spec.moments import Moments
from tests.runtime.checkpoints import course
from tests.runtime.plans import OPTIMIZER, plan_of, tiny_model, tiny_training

LAYERS, STEPS, AT = 2, 4, 2
LAYOUTS = {
    "dp2-zero1": Strategy(dp=2, zero=1),
    "dp2-zero3": Strategy(dp=2, zero=3),
    "pp2": Strategy(dp=1, pp=2),
    "tp2": Strategy(dp=1, tp=2),
    "ep2-zero1": Strategy(dp=2, ep=2, zero=1),
    "ep2-zero2": Strategy(dp=2, ep=2, zero=2),
}
# What experts' ranks own of a layer is two ranges of it, in one piece of the host's, where they lie
# behind one another, or of the GPU's, where they do not.
ON_GPU = ("ep2-zero2",)
EXPERTS: dict[str, object] = {"ffn": 32, "experts": 4, "experts_per_token": 2}


def with_experts(name: str) -> bool:
    """Whether a layout is of the model with experts."""
    return LAYOUTS[name].ep > 1


def moments_plan(
    strategy: Strategy,
    moments: Moments,
    tier: Tier = Tier.GPU,
    device: str = "cpu",
    *,
    experts: bool = False,
) -> Plan:
    """Two sequences a step; optimizer state on a tier."""
    stages = []
    for stage in range(strategy.pp):
        kinds = {"block": _kind(LAYERS // strategy.pp, tier)}
        if stage == 0:
            kinds["embedding"] = _kind(1, tier)
        if stage == strategy.pp - 1:
            kinds["head"] = _kind(1, tier)
        stages.append(StagePlacement(kinds=kinds))
    optimizer = OPTIMIZER.model_copy(update={"moments": moments})
    training = tiny_training(2, precision="bf16", clip_norm=1.0, optimizer=optimizer)
    placement = Placement(stages=tuple(stages), slots=2, chunk=20_000)
    model = tiny_model(layers=LAYERS, **(EXPERTS if experts else {}))
    return plan_of(model, training, strategy, placement, device)


def _kind(layers: int, tier: Tier) -> KindPlacement:
    here = {Tier.GPU: layers}
    apart = 0.7 * layers if tier is Tier.HOST else float(layers)  # a layer's state is in two pieces
    state = {Tier.GPU: layers - apart, tier: apart}
    return KindPlacement(
        layers=layers,
        parameters=here,
        gradients=here,
        activations={Recompute.NONE: here},
        optimizer=state,
    )


def run_rank(rank: int, folder: str) -> None:
    """One process: every layout in turn goes on from one rank's checkpoint, then writes its own."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    path = Path(folder)
    found: dict[tuple[str, str], tuple[list[float], str]] = {}
    for moments in ("bf16", "int8"):
        for name, strategy in LAYOUTS.items():
            experts = with_experts(name)
            source = latest(path / f"one-{moments}-{experts}")
            assert source is not None
            tier = Tier.GPU if name in ON_GPU else Tier.HOST
            plan = moments_plan(strategy, moments, tier, experts=experts)
            kept = path / f"{name}-{moments}"
            meeting = path / f"meeting-{name}-{moments}"
            gone_on = course(
                plan, STEPS, source.path, at=STEPS, folder=kept, rank=rank, meeting=meeting
            )
            found[name, moments] = gone_on.losses, gone_on.ended
    (path / f"losses.{rank}").write_bytes(pickle.dumps(found))
