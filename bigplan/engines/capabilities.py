"""Limits of the engines: for a model and a strategy, why one cannot run them, or that it can."""

from __future__ import annotations

from bigplan.graph.strategy import Strategy
from bigplan.spec.model import ModelSpec

NATIVE_STRATEGY = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "zero": 0}
NATIVE_BLOCKS = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope"}


def native_refusal(model: ModelSpec, strategy: Strategy, sequence_length: int) -> str | None:
    """Why the native runtime cannot execute this; None: it can.

    A sliding window matters only to sequences longer than it.
    """
    over = [
        f"{name} {getattr(strategy, name)}"
        for name, limit in NATIVE_STRATEGY.items()
        if getattr(strategy, name) > limit
    ]
    if over:
        return f"the native runtime executes data parallelism only, not {', '.join(over)}"
    unlike = [
        f"{name} {getattr(model, name)}"
        for name, value in NATIVE_BLOCKS.items()
        if getattr(model, name) != value
    ]
    if unlike:
        return f"the native runtime executes llama-style blocks only, not {', '.join(unlike)}"
    if model.sliding_window is not None and model.sliding_window < sequence_length:
        return (
            f"the native runtime attends to all {sequence_length} tokens of a sequence, the model "
            f"to {model.sliding_window}: use a sequence_length of at most {model.sliding_window}"
        )
    return None


def deepspeed_refusal() -> str:
    """Why DeepSpeed cannot execute the plan."""
    return "bigplan writes no DeepSpeed configuration"


def executable(model: ModelSpec, strategy: Strategy, sequence_length: int) -> dict[str, bool | str]:
    """By engine: true, or the reason why not."""
    return {
        "native": native_refusal(model, strategy, sequence_length) or True,
        "deepspeed": deepspeed_refusal(),
    }
