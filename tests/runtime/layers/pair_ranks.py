"""Plans of ranks that learn from pairs of responses, for the processes of sharded_ranks to run."""

from __future__ import annotations

from pathlib import Path

from bigplan.graph.build import build_graph
from bigplan.graph.strategy import Strategy
from bigplan.plan import Plan
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from tests.runtime.layers.pair_loop import DPO, LENGTH, pair_training, prepare_pairs
from tests.runtime.linear.lora_ranks import UNLIKE
from tests.runtime.parallel.sharded_ranks import all_resident, placed_everywhere
from tests.runtime.plans import SHORT, plan_of, tiny_model

# By name: some split is beside each part of a model that the head's passes differ by.
LAYOUTS: dict[int, dict[str, Strategy]] = {
    2: {
        "zero3": Strategy(dp=2, zero=3, micro_batch=2),
        "tp": Strategy(dp=1, tp=2, accumulation_group=2),
        "tp-whole": Strategy(dp=1, tp=2, sequence_parallel=False, micro_batch=2),
        "pp": Strategy(dp=1, pp=2, accumulation_group=2),
        "cp": Strategy(dp=1, cp=2, micro_batch=2),
        "unlike": Strategy(dp=2, micro_batch=3, replicas=UNLIKE),
        "unlike-simpo": Strategy(dp=2, micro_batch=3, replicas=UNLIKE),
        "cp-orpo": Strategy(dp=1, cp=2, micro_batch=2),
    },
    4: {
        "cp-tp": Strategy(dp=1, cp=2, tp=2),
        "cp-pp": Strategy(dp=1, cp=2, pp=2, zero=3),
    },
}
METHODS: dict[str, dict[str, object]] = {
    "unlike-simpo": {"method": "simpo", "gamma": 0.3},
    "cp-orpo": {"method": "orpo", "beta": 0.5},
}
CAPPED: dict[str, object] = {"logit_cap": 2.0, "logit_scale": 0.5, "vocab": 257}
PARTS: dict[str, dict[str, object]] = {
    "tp": CAPPED,
    "cp": CAPPED,
    "zero3": {"tied_embeddings": True},
    "pp": {"tied_embeddings": True},
}


def pair_plan(model: ModelSpec, training: Training, strategy: Strategy) -> Plan:
    """All on the GPUs; what ZeRO shards, with one GPU's share of layers, on every tier."""
    placement = all_resident(build_graph(model, training, strategy))
    if strategy.zero and strategy.pp == strategy.cp == 1 and not model.tied_embeddings:
        placement = placed_everywhere(strategy.zero, SHORT)
    return plan_of(model, training, strategy, placement)


def plans(ranks: int, folder: Path) -> dict[str, Plan]:
    """One training under every layout."""
    data, found = prepare_pairs(folder), {}
    for name, strategy in LAYOUTS[ranks].items():
        training = pair_training(data, preference=METHODS.get(name, DPO))
        assert training.sequence_length == LENGTH
        found[name] = pair_plan(tiny_model(layers=3, **PARTS.get(name, {})), training, strategy)
    return found
