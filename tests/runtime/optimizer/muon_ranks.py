"""Plans whose matrices Muon updates, and processes that run them and go on."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.plan import Plan
from bigplan.runtime.checkpoint import latest
from bigplan.spec.optimizer import Optimizer, ParameterGroup
from tests.runtime.checkpoints import course
from tests.runtime.plans import plan_of, tiny_model, tiny_training

LAYERS, STEPS, AT = 2, 4, 2
LAYOUTS = {
    "dp2": Strategy(dp=2),
    "dp2-zero2": Strategy(dp=2, zero=2),
    "dp2-zero3": Strategy(dp=2, zero=3),
    "cp2-zero1": Strategy(dp=1, cp=2, zero=1),
    "pp2": Strategy(dp=1, pp=2),
    "tp2": Strategy(dp=1, tp=2),
    "tp4": Strategy(dp=1, tp=4),
    "dp2-tp2-zero3": Strategy(dp=2, tp=2, zero=3),
    "groups-zero3": Strategy(dp=2, cp=2, zero=3, zero_group=2),
}
MUON = Optimizer(
    name="muon",
    learning_rate=1e-2,
    epsilon=1e-6,
    groups=(
        ParameterGroup(match="layers.0.q_proj.weight", weight_decay=0.0),
        ParameterGroup(match="layers.*.up_proj.weight", learning_rate_factor=0.5),
    ),
)
# Four experts, each a matrix of its own, with a router.
EXPERTS: dict[str, object] = {"ffn": 32, "experts": 4, "experts_per_token": 2}


# A layout of LAYOUTS with experts, which ranks split.
WITH_EXPERTS = {"tp2-experts": "tp2"}


def muon_plan(
    strategy: Strategy,
    tier: Tier = Tier.GPU,
    device: str = "cpu",
    *,
    model: Mapping[str, object] | None = None,
    changes: Mapping[str, object] | None = None,
) -> Plan:
    """Two sequences a step; the optimizer's state on the GPU, or in host memory and streamed."""
    stages = []
    for stage in range(strategy.pp):
        kinds = {"block": _kind(LAYERS // strategy.pp, tier)}
        if stage == 0:
            kinds["embedding"] = _kind(1, tier)
        if stage == strategy.pp - 1:
            kinds["head"] = _kind(1, tier)
        stages.append(StagePlacement(kinds=kinds))
    usual = {"precision": "bf16", "clip_norm": 1.0, "optimizer": MUON}
    placement = Placement(stages=tuple(stages), slots=2, chunk=20_000)
    spec = tiny_model(layers=LAYERS, **(model or {}))
    return plan_of(
        spec, tiny_training(2, **{**usual, **(changes or {})}), strategy, placement, device
    )


def _kind(layers: int, tier: Tier) -> KindPlacement:
    here = {Tier.GPU: layers}
    return KindPlacement(
        layers=layers,
        parameters=here,
        gradients=here,
        activations={Recompute.NONE: here},
        optimizer={tier: float(layers)},
        streamed=float(layers) if tier is Tier.HOST else 0.0,
    )


def layout_of(name: str) -> tuple[Strategy, Mapping[str, object]]:
    """How ranks split a step, and what of the model is not the usual."""
    return LAYOUTS[WITH_EXPERTS.get(name, name)], EXPERTS if name in WITH_EXPERTS else {}


def run_two(rank: int, folder: str) -> None:
    """One of two processes."""
    _run(rank, folder, 2)


def run_four(rank: int, folder: str) -> None:
    """One of four processes."""
    _run(rank, folder, 4)


def _run(rank: int, folder: str, ranks: int) -> None:
    """Every layout in turn goes on from one rank's checkpoint, then writes its own."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    path = Path(folder)
    found: dict[str, list[float]] = {}
    for name in (*LAYOUTS, *WITH_EXPERTS):
        strategy, model = layout_of(name)
        if strategy.ranks != ranks:
            continue
        source = latest(path / ("experts" if model else "one"))
        assert source is not None
        tier = Tier.HOST if strategy.zero in (1, 3) else Tier.GPU
        gone_on = course(
            muon_plan(strategy, tier, model=model),
            STEPS,
            source.path,
            at=STEPS,
            folder=path / name,
            rank=rank,
            meeting=path / f"meeting-{name}",
        )
        found[name] = gone_on.losses
    (path / f"losses.{ranks}.{rank}").write_bytes(pickle.dumps(found))
