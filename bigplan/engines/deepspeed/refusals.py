"""What DeepSpeed, as bigplan drives it, does not execute, and why."""

from __future__ import annotations

from bigplan.capabilities.native import native_refusal
from bigplan.capabilities.other_tools import other_tools_refusal
from bigplan.capabilities.splits import expert_parallel_refusal
from bigplan.graph.strategy import Strategy
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.spec.unplanned import NO_MICS

PRECISIONS = ("bf16", "fp32")


def refusal(model: ModelSpec, training: Training, strategy: Strategy) -> str | None:
    """Why DeepSpeed cannot execute this request; None: it can. Layers are the native runtime's."""
    if why := other_tools_refusal(model, training, "DeepSpeed"):
        return why
    if training.precision not in PRECISIONS:
        return (
            f"DeepSpeed has a loss scale of its own for {training.precision}, whose steps are not "
            f"those of the native engine: use precision {' or '.join(PRECISIONS)}"
        )
    if training.optimizer.name != "adamw":
        return f"DeepSpeed updates by AdamW here, not by {training.optimizer.name}"
    ways = expert_parallel_refusal(strategy.ep, model, "DeepSpeed")
    split = ways or _split_refusal(strategy) or _pipeline_refusal(training, strategy)
    alone = Strategy(dp=strategy.dp, micro_batch=strategy.micro_batch)
    return split or native_refusal(model, training, alone)


def _split_refusal(strategy: Strategy) -> str | None:
    if strategy.tp > 1:
        return (
            "DeepSpeed's AutoTP splits nn.Linear modules, which bigplan's layers are not: it finds "
            f"nothing to split in them. tp {strategy.tp} needs --engine native"
        )
    if strategy.cp > 1:
        return (
            "DeepSpeed's Ulysses is a module of its own attention, which bigplan's layers do not "
            f"call: cp {strategy.cp} needs --engine native"
        )
    if strategy.zero_group:
        return f"zero_group {strategy.zero_group}: {NO_MICS}"
    if strategy.accumulation_group > 1:
        return (
            "DeepSpeed passes one micro-batch after the other through all layers: "
            f"accumulation_group {strategy.accumulation_group} needs --engine native"
        )
    return None


def _pipeline_refusal(training: Training, strategy: Strategy) -> str | None:
    if strategy.pp == 1:
        return None
    if strategy.vpp > 1:
        return (
            f"DeepSpeed gives a stage one row of layers: vpp {strategy.vpp} needs --engine native"
        )
    if strategy.zero > 1:
        return (
            f"DeepSpeed's pipelines take ZeRO 0 or 1, not {strategy.zero}: its engine sums "
            "gradients where they are made until a step's last micro-batch"
        )
    if strategy.zero == 0 and strategy.dp > 1 and training.precision != "fp32":
        return (
            f"in {training.precision} DeepSpeed's pipelines share optimizer state out over "
            f"data-parallel ranks in any case: use zero 1 with dp {strategy.dp}"
        )
    return None
