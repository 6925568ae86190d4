"""Plans whose products are in 8 bits, and processes that run them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement, StagePlacement, Tier
from bigplan.plan import Plan
from tests.runtime.harness import started
from tests.runtime.plans import plan_of, tiny_model, tiny_training
from tests.toys import kind_placement

LAYERS, STEPS = 2, 4
LAYOUTS = {
    "dp2-zero1": Strategy(dp=2),
    "dp2-zero3": Strategy(dp=2, zero=3),
    "pp2": Strategy(dp=1, pp=2),
    "tp2": Strategy(dp=1, tp=2),
}
OF_EXPERTS = {
    "experts-zero3": Strategy(dp=2, zero=3),
    "experts-ep2": Strategy(dp=2, ep=2),
    "experts-tp2": Strategy(dp=1, tp=2),
}
EXPERTS: Mapping[str, object] = {"experts": 4, "experts_per_token": 2, "ffn": 32, "shared_ffn": 32}


def plan(
    strategy: Strategy,
    recompute: Recompute = Recompute.NONE,
    tier: Tier = Tier.GPU,
    device: str = "cpu",
    *,
    of: Mapping[str, object] = MappingProxyType({}),
    **training: object,
) -> Plan:
    """Two micro-batches of one sequence a step, of a model with `of` changed."""
    stages = []
    for stage in range(strategy.pp):
        block = kind_placement(LAYERS // strategy.pp, tier, tier, (recompute, tier), tier)
        kinds = {"block": block}
        if stage == 0:
            kinds["embedding"] = kind_placement(1)
        if stage == strategy.pp - 1:
            kinds["head"] = kind_placement(1)
        stages.append(StagePlacement(kinds=kinds))
    settings = {"precision": "bf16", "fp8_gemms": True, "clip_norm": 1.0, **training}
    placement = Placement(stages=tuple(stages), slots=2)
    model = tiny_model(layers=LAYERS, **of)
    return plan_of(model, tiny_training(2, **settings), strategy, placement, device)


def losses(plan: Plan, rank: int = 0, meeting: Path = Path()) -> list[float]:
    """Of a few steps."""
    with started(plan, rank=rank, meeting=meeting) as worker:
        found = [worker.step().loss for _ in range(STEPS)]
        worker.finish()
        return found


def run_rank(rank: int, folder: str) -> None:
    """One process: every layout in turn."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    path = Path(folder)
    plans = {name: plan(one) for name, one in LAYOUTS.items()}
    plans |= {name: plan(one, of=EXPERTS) for name, one in OF_EXPERTS.items()}
    found = {name: losses(one, rank, path / name) for name, one in plans.items()}
    (path / f"losses.{rank}").write_bytes(pickle.dumps(found))
