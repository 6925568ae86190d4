"""Plans of ranks that share out experts, and processes that run them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch

from bigplan.graph.build import build_graph
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement, Tier
from bigplan.plan import Plan
from tests.runtime.checkpoints import Course, course
from tests.runtime.parallel.sharded_ranks import DELTA_RULE, all_resident
from tests.runtime.plans import LENGTH, plan_of, tiny_model, tiny_training

BATCH, STEPS = 4, 2  # steps of a course; the last one writes what the first has left
EXPERTS: dict[str, object] = {"ffn": 32, "experts": 4, "experts_per_token": 2}
BESIDE: dict[str, object] = {
    "shared_ffn": 48,
    "dense_blocks": 1,
    "dense_ffn": 64,
    "routing": {"scores": "sigmoid", "bias": True},
}
# Llama 4's blocks: one with experts and chunks, one without experts, one that sees all tokens.
LLAMA_4: dict[str, object] = {
    "experts_per_token": 1,
    "router_normalised": False,
    "routing": {"scores": "sigmoid", "weighs": "inputs"},
    "shared_ffn": 48,
    "expert_pattern": ("1 routed", "1 dense"),
    "dense_ffn": 64,
    "qk_norm": True,
    "qk_norm_turned": True,
    "weightless_norms": "heads",
    "attention_chunk": LENGTH // 4,
    "attention_pattern": ("2 local", "1 global"),
    "global_rope": False,
    "global_query_growth": {"factor": 0.5, "length": 3},
}
# Nemotron 3 Super's experts, which read a latent that is narrower than what their router reads.
LATENT: dict[str, object] = {
    "mlp": "relu2",
    "expert_latent": 24,
    "shared_ffn": 48,
    "routing": {"scores": "sigmoid", "bias": True, "scale": 2.5},
}
# Blocks of Nemotron-H's kind: attention, an MLP for all tokens, and experts, each alone.
BOTH: dict[str, object] = {
    "mlp": "relu2",
    "mixer_pattern": ("1 mlp", "1 attention", "1 mlp"),
    "expert_pattern": ("2 dense", "1 routed"),
    "dense_ffn": 64,
    "shared_ffn": 48,
    "routing": {"scores": "sigmoid", "bias": True, "scale": 2.5},
}
# Lara 4 Mini's: a delta rule, attention in a window, and attention that sees all tokens.
LARA_MINI: dict[str, object] = DELTA_RULE | {
    "mixer_pattern": ("1 delta_rule", "2 attention"),
    "attention_pattern": ("2 local", "1 global"),
    "sliding_window": 5,
    "global_rope": False,
    "shared_ffn": 48,
}
KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "beside": BESIDE,
    "llama4": LLAMA_4,
    "latent": LATENT,
    "both": BOTH,
    "lara-mini": LARA_MINI,
}
ALONE = Strategy(dp=1, micro_batch=2)


def layouts(ranks: int) -> dict[str, tuple[Strategy, Recompute]]:
    """Ways to share out experts, each with a recomputation; the last ones have all everywhere."""
    if ranks == 2:
        return {
            "ep2": (Strategy(dp=2, ep=2, micro_batch=2), Recompute.NONE),
            "ep2-zero1": (Strategy(dp=2, ep=2, zero=1), Recompute.MLP),
            "dp2": (Strategy(dp=2), Recompute.NONE),
        }
    return {
        "ep4": (Strategy(dp=4, ep=4), Recompute.NONE),
        "ep2": (Strategy(dp=4, ep=2), Recompute.SELECTIVE),
        "ep2-pp2": (Strategy(dp=2, ep=2, pp=2, accumulation_group=2), Recompute.SELECTIVE),
        "ep2-zero3": (Strategy(dp=4, ep=2, zero=3), Recompute.SELECTIVE),
        "ep2-zero2-groups": (Strategy(dp=4, ep=2, zero=2, zero_group=2), Recompute.MLP),
        "ep4-zero3": (Strategy(dp=4, ep=4, zero=3), Recompute.FULL),
        "ep2-tp2": (Strategy(dp=2, ep=2, tp=2), Recompute.NONE),
        "ep4-cp2-zero1": (Strategy(dp=2, ep=4, cp=2, zero=1), Recompute.MLP),
        "ep2-tp2-zero3": (Strategy(dp=2, ep=2, tp=2, zero=3), Recompute.FULL),
        "ep2-tp2-cp2-zero2": (
            Strategy(dp=1, ep=2, tp=2, cp=2, zero=2, sequence_parallel=False),
            Recompute.MLP,
        ),
        "dp4": (Strategy(dp=4), Recompute.NONE),
    }


# Layouts of four ranks. Of a model with more than experts: a first stage without experts, all of
# ZeRO, and matrices that are split; experts alone have the others. Two ranks have every model with
# experts spread alone and with all everywhere. Blocks of several kinds are told by stages and by
# what splits a layer in every way.
FEW = {
    "plain": ("ep4", "ep2", "ep4-zero3", "ep4-cp2-zero1", "ep2-tp2-zero3", "dp4"),
    "beside": ("ep2-pp2", "ep2-zero3", "ep2-zero2-groups", "ep2-tp2", "ep2-tp2-cp2-zero2"),
    "llama4": ("ep2-pp2", "ep2-tp2-cp2-zero2"),
    "both": ("ep2-pp2", "ep2-tp2-zero3"),
    "lara-mini": ("ep2-pp2", "ep2-tp2-cp2-zero2"),
    "latent": ("ep2-tp2", "ep4-zero3", "ep2-tp2-cp2-zero2"),
}


def names(ranks: int, kind: str) -> list[str]:
    """Layouts of a kind of training, in their order."""
    return [name for name in layouts(ranks) if ranks == 2 or name in FEW[kind]]


def plans(ranks: int) -> dict[str, Plan]:
    """By name, those of one training with experts, and of one with what may lie beside them."""
    return {
        f"{kind}-{name}": plan_for(kind, *layouts(ranks)[name])
        for kind in KINDS
        for name in names(ranks, kind)
    }


def plan_for(kind: str, strategy: Strategy = ALONE, recompute: Recompute = Recompute.NONE) -> Plan:
    """A kind of training under a layout, all on the GPUs but what `mlp` and `full` keep."""
    model = tiny_model(layers=3, **EXPERTS | KINDS[kind])
    training = tiny_training(BATCH, clip_norm=0.5)
    placement = all_resident(build_graph(model, training, strategy))
    return plan_of(model, training, strategy, _recomputing(placement, recompute))


def _recomputing(placement: Placement, recompute: Recompute) -> Placement:
    tier = Tier.HOST if recompute in (Recompute.MLP, Recompute.FULL) else Tier.GPU
    stages = []
    for stage in placement.stages:
        kinds = {
            name: kind.model_copy(update={"activations": {recompute: {tier: kind.layers}}})
            if name == "block"
            else kind
            for name, kind in stage.kinds.items()
        }
        stages.append(stage.model_copy(update={"kinds": kinds}))
    return placement.model_copy(update={"stages": tuple(stages)})


def run_rank(rank: int, folder: str) -> None:
    """One process: every plan in turn, from the checkpoint of the one before."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    path, until, before = Path(folder), STEPS, ""
    every: dict[str, Plan] = pickle.loads((path / "plans").read_bytes())
    for name, plan in every.items():
        kind = name.partition("-")[0]
        if not before.startswith(kind):
            until, before = STEPS, ""
        resume = path / f"{before}.saved" if before else None
        played = course(
            plan,
            until,
            resume,
            at=until,
            folder=path / f"{name}.saved",
            rank=rank,
            meeting=path / f"{name}.meeting",
        )
        torch.save(played, path / f"{name}.{rank}.pt")
        until, before = until + 1, name


def played(folder: Path, name: str, rank: int) -> Course:
    """What a rank left."""
    found = torch.load(folder / f"{name}.{rank}.pt", weights_only=False)  # our own file
    assert isinstance(found, Course)
    return found
