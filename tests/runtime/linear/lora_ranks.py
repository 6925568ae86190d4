"""Plans of ranks that train adapters, and processes that run them."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from bigplan.content import ADAPTERS
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Replicas, Strategy
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.plan import Plan
from bigplan.rectangle import Rectangle
from bigplan.runtime.weights.digest import stage_adapters
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.lora import possible_targets
from bigplan.spec.model import ModelSpec
from tests.runtime.checkpoints import running
from tests.runtime.harness import context_of
from tests.runtime.plans import plan_of, tiny_model, tiny_training

LORA: dict[str, object] = {"rank": 4, "alpha": 8.0}
# On unlike nodes: one has three of the four sequences of a step.
UNLIKE = (Replicas(number=1, micro_batch=3), Replicas(number=1, micro_batch=1))
IN_TURN = 4  # plans of which each goes on where the one before has stopped, after one step
# A dense block and one with experts, each with a convolution before one with attention.
SEVERAL_KINDS: dict[str, object] = {
    "experts": 4,
    "experts_per_token": 2,
    "router_loss": 0.0,  # the plain loop balances experts over all tokens of a step
    "ffn": 32,
    "shared_ffn": 32,
    "dense_blocks": 2,
    "dense_ffn": 64,
    "convolution": {"taps": 3},
    "mixer_pattern": ("1 convolution", "1 attention"),
}
# Blocks that are a state space, a delta rule, experts or attention alone.
STATES: dict[str, object] = {
    "state_space": {"heads": 16, "head_dim": 4, "state": 16},
    "delta_rule": {"key_heads": 4, "value_heads": 16, "key_dim": 4, "value_dim": 16},
    "mixer_pattern": ("1 state_space", "1 delta_rule", "1 mlp", "1 attention"),
    "positions": "none",
    "mlp": "relu2",
    "ffn": 32,
    "experts": 4,
    "experts_per_token": 2,
    "shared_ffn": 32,
}
OF_STATES = ("tp2", "pp2-vpp2", "cp2-zero3")  # layouts that split what is in a block, or blocks


@dataclass(frozen=True, slots=True)
class LoraRun:
    """What a rank computed in one step."""

    done: int  # steps before
    loss: float
    digest: str
    adapters: dict[str, tuple[Rectangle, Tensor]]  # by name in the model, those that it has


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


def layouts(ranks: int) -> dict[str, Strategy]:
    """Ways to split a step over so many ranks."""
    if ranks == 2:
        return {
            "dp2": Strategy(dp=2),
            "dp2-zero3": Strategy(dp=2, zero=3),
            "tp2": Strategy(dp=1, tp=2, accumulation_group=2),
            "tp2-whole": Strategy(dp=1, tp=2, sequence_parallel=False),
            "pp2": Strategy(dp=1, pp=2, accumulation_group=2, first_blocks=1),
            "pp2-vpp2": Strategy(dp=1, pp=2, vpp=2),
            "cp2-zero3": Strategy(dp=1, cp=2, zero=3),
            "unlike-zero3": Strategy(dp=2, micro_batch=3, zero=3, replicas=UNLIKE),
        }
    return {
        "tp4": Strategy(dp=1, tp=4),
        "dp2-pp2-zero3": Strategy(dp=2, pp=2, zero=3),
        "dp4-zero3-groups": Strategy(dp=4, zero=3, zero_group=2),
        "cp2-tp2": Strategy(dp=1, cp=2, tp=2),
        "dp4-ep2-zero3": Strategy(dp=4, ep=2, zero=3),
        "dp4-ep2-zero3-groups": Strategy(dp=4, ep=2, zero=3, zero_group=2),
        "dp2-ep4-cp2-zero3": Strategy(dp=2, ep=4, cp=2, zero=3),
        "dp2-ep2-tp2": Strategy(dp=2, ep=2, tp=2),
        "unlike-tp2-zero3": Strategy(dp=2, tp=2, micro_batch=3, zero=3, replicas=UNLIKE),
    }


def plans(
    ranks: int,
    *,
    clip_norm: float | None,
    parts: Mapping[str, object] | None = None,
    dropout: float = 0.0,
) -> dict[str, Plan]:
    """One training under every layout: frozen blocks on the GPU, in host memory or on a drive.

    `parts`: of a model in place of the usual one; with a state space, some layouts. With `dropout`
    experts have no adapters.
    """
    found = {}
    ways = list(Recompute)
    several = parts or (SEVERAL_KINDS if ranks == 4 else {})
    for number, (name, strategy) in enumerate(layouts(ranks).items()):
        tier = (Tier.GPU, Tier.HOST, Tier.NVME)[number % 3]
        if strategy.shards > 1 and not strategy.zero:
            tier = Tier.GPU  # what is not sharded does not leave
        recompute = ways[number % len(ways)]
        if "state_space" in several and name not in OF_STATES:
            continue
        model = tiny_model(layers=4, tied_embeddings=ranks == 4, **several)
        every = {"targets": possible_targets(model)} if several and not dropout else {}
        lora = {**LORA, **every, "dropout": dropout}
        training = tiny_training(4, clip_norm=clip_norm, lora=lora)
        placement = alike(model, strategy, tier, recompute)
        found[name] = plan_of(model, training, strategy, placement)
    return found


def alike(model: ModelSpec, strategy: Strategy, tier: Tier, recompute: Recompute) -> Placement:
    """Every kind of block at this tier and recomputed so."""
    blocks, stages = (
        iter(model.layer_sequence()[1:-1]),
        [Counter[str]() for _ in range(strategy.pp)],
    )
    for chunk, number in enumerate(strategy.cut.blocks(model.layers)):
        stages[chunk % strategy.pp].update(islice(blocks, number))
    placed = [{k: frozen(n, tier, recompute) for k, n in stage.items()} for stage in stages]
    placed[0]["embedding"] = placed[-1]["head"] = frozen(1)
    return Placement(stages=tuple(StagePlacement(kinds=kinds) for kinds in placed), slots=2)


def run_rank(rank: int, folder: str) -> None:
    """One process: every plan in turn, a step each, from the checkpoint of the one before."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    path = Path(folder)
    every: dict[str, Plan] = pickle.loads((path / "plans").read_bytes())
    before: Path | None = None
    for number, (name, plan) in enumerate(every.items()):
        resume, before = (before if number % IN_TURN else None), path / f"{name}.saved"
        with running(plan, resume, rank=rank, meeting=path / f"{name}.meeting") as (worker, done):
            loss = worker.step().loss
            worker.save(before)
            run = LoraRun(done, loss, worker.finish().digest, _adapters(worker))
        torch.save(run, path / f"{name}.{rank}.pt")


def _adapters(worker: NativeWorker) -> dict[str, tuple[Rectangle, Tensor]]:
    context = context_of(worker)
    flat, found = stage_adapters(context), {}
    for name, held in context.rows[ADAPTERS].held.items():
        if held is not None:
            start = context.rows[ADAPTERS].element(held)
            values = flat[start : start + held.elements].view(held.rows, held.columns)
            found[name] = held, values.clone()
    return found
