"""Limits of the engines: for a model and a strategy, why one cannot run them, or that it can."""

from __future__ import annotations

from bigplan.graph.strategy import Strategy
from bigplan.spec.model import ModelSpec

NATIVE_STRATEGY = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "zero": 0}
NATIVE_BLOCKS = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope"}


def native_refusal(model: ModelSpec, strategy: Strategy) -> str | None:
    """Why the native runtime cannot execute this; None: it can."""
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
    return None


def deepspeed_refusal() -> str:
    """Why DeepSpeed cannot execute the plan."""
    return "bigplan writes no DeepSpeed configuration"


def executable(model: ModelSpec, strategy: Strategy) -> dict[str, bool | str]:
    """By engine: true, or the reason why not."""
    return {
        "native": native_refusal(model, strategy) or True,
        "deepspeed": deepspeed_refusal(),
    }
