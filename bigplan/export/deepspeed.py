"""DeepSpeed's JSON: that of a plan for DeepSpeed, or the nearest to another plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bigplan.engines.deepspeed.config import configuration
from bigplan.engines.deepspeed.decisions import Decisions
from bigplan.engines.deepspeed.search import DeepSpeedSearch
from bigplan.export.written import (
    Blocks,
    WrittenConfig,
    attention_of,
    heading,
    lost_groups,
    lost_without_context,
)
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy, chunk_blocks
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.planner import Request

NAME = "ds_config.json"
FOLDER = "/path/to/a/drive"  # the folder of state on drives, which no plan knows


def written(plan: Plan) -> WrittenConfig:
    """The configuration, a script that sets its environment, and the plan's promise."""
    lost = tuple(_lost(plan))
    config = plan.config or nearest(plan)
    settings = json.loads(json.dumps(config["json"]))
    for offload in ("offload_optimizer", "offload_param"):
        part = settings["zero_optimization"].get(offload, {})
        if part.get("device") == "nvme":
            part["nvme_path"] = FOLDER
    settings |= {"optimizer": _optimizer(plan)}
    exports = "".join(f"export {key}={value}\n" for key, value in config["environment"].items())
    comments = heading(plan, lost) + attention_of(plan)
    return WrittenConfig(
        {NAME: json.dumps(settings, indent=2) + "\n", "ds_env.sh": comments + exports},
        lost,
    )


def nearest(plan: Plan) -> dict[str, Any]:
    """The nearest DeepSpeed decisions to a native plan, with their buffers' sizes."""
    way = decisions_near(plan)
    request = Request(plan.model, plan.training, plan.cluster, engine="deepspeed")
    tried = DeepSpeedSearch(request).tried(way)
    return configuration(way, tried.held.sizes, plan.training, plan.cluster.group)


def decisions_near(plan: Plan) -> Decisions:
    """One tier for all state, one for parameters: the slowest that any block has."""
    blocks, strategy = Blocks.of(plan), plan.strategy
    state = _slowest(blocks.placed.optimizer)
    parameters = _slowest(blocks.placed.parameters)
    needs = 3 if parameters is not Tier.GPU or state is Tier.NVME else 2
    stage = max(strategy.zero, needs if state is not Tier.GPU else strategy.zero)
    part = stage == 3 and state is Tier.HOST and parameters is Tier.GPU
    return Decisions(
        _strategy(plan, stage),
        stage,
        state=state,
        parameters=parameters if state is not Tier.GPU else Tier.GPU,
        on_cpu=round(blocks.state_away, 2) if part and 0 < blocks.state_away < 1 else 1.0,
        recompute=blocks.recomputed(Recompute.NONE) < blocks.placed.layers,
        loss_chunk=plan.placement.loss_chunk,
    )


def _strategy(plan: Plan, stage: int) -> Strategy:
    """The plan's data parallelism, under the stage."""
    zero = stage if plan.strategy.dp > 1 else 0
    changes = {"zero": zero, "tp": 1, "cp": 1, "pp": 1, "vpp": 1, "accumulation_group": 1}
    changes |= {"first_blocks": 0, "last_blocks": 0, "zero_group": 0}
    return plan.strategy.model_copy(update=changes)


def _slowest(tiers: Mapping[Tier, float]) -> Tier:
    return max((tier for tier, count in tiers.items() if count), key=list(Tier).index)


def _optimizer(plan: Plan) -> dict[str, Any]:
    optimizer = plan.training.optimizer
    return {
        "type": "AdamW",
        "params": {
            "lr": optimizer.learning_rate,
            "betas": [optimizer.beta1, optimizer.beta2],
            "eps": optimizer.epsilon,
            "weight_decay": optimizer.weight_decay,
        },
    }


def _lost(plan: Plan) -> Iterator[str]:
    blocks = Blocks.of(plan)
    again = plan.model.layers - blocks.recomputed(Recompute.NONE)
    if again:
        yield (
            f"recomputation of {again} of {plan.model.layers} blocks: the model's own code does "
            "it (torch.utils.checkpoint), no key does"
        )
    if plan.config and plan.strategy.pp > 1:
        yield _stages(plan)
    if plan.config:
        return
    yield from lost_without_context(plan)
    yield from lost_groups(plan)
    if plan.strategy.tp > 1:
        yield f"tensor parallelism of {plan.strategy.tp}"
    if plan.strategy.pp > 1:
        yield _stages(plan)
    away = round(blocks.state_away, 2)  # as the ratio is written
    if 0 < away < 1 and decisions_near(plan).on_cpu == 1:
        yield f"{away:.0%} of the state off the GPU: all is (only ZeRO-3 has a ratio, on the host)"
    if plan.training.optimizer.name != "adamw":
        yield f"{plan.training.optimizer.name}: AdamW is written"
    if len({*(k for k, n in blocks.placed.parameters.items() if n)}) > 1:
        yield "parameters of some blocks alone off the GPU: all are, as DeepSpeed treats all alike"


def _stages(plan: Plan) -> str:
    blocks = ", ".join(map(str, chunk_blocks(plan.model.layers, plan.strategy)))
    return (
        f"{plan.strategy.pp} pipeline stages of {blocks} blocks: PipelineModule is code, not "
        "configuration"
    )
