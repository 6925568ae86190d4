"""What DeepSpeed, as bigplan drives it, does not execute, and why."""

from __future__ import annotations

from bigplan.capabilities import native_refusal
from bigplan.graph.strategy import Strategy
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

PRECISIONS = ("bf16", "fp32")


def refusal(model: ModelSpec, training: Training, strategy: Strategy) -> str | None:
    """Why DeepSpeed cannot execute this; None: it can. Layers are the native runtime's."""
    if training.precision not in PRECISIONS:
        return (
            f"DeepSpeed has a loss scale of its own for {training.precision}, whose steps are not "
            f"those of the native engine: use precision {' or '.join(PRECISIONS)}"
        )
    if training.optimizer.name != "adamw":
        return f"DeepSpeed updates by AdamW here, not by {training.optimizer.name}"
    split = _split_refusal(strategy)
    alone = Strategy(dp=strategy.dp, micro_batch=strategy.micro_batch)
    return split or native_refusal(model, training, alone)


def _split_refusal(strategy: Strategy) -> str | None:
    if strategy.tp > 1:
        return (
            f"DeepSpeed's AutoTP splits modules of Hugging Face models by their names, not the "
            f"layers that bigplan trains: tp {strategy.tp} needs --engine native"
        )
    if strategy.pp > 1:
        return f"pipelines are not run through DeepSpeed yet: pp {strategy.pp} is for native plans"
    if strategy.accumulation_group > 1:
        return (
            "DeepSpeed passes one micro-batch after the other through all layers: "
            f"accumulation_group {strategy.accumulation_group} needs --engine native"
        )
    return None
