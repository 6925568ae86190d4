"""Which models' blocks families.py writes graphs of."""

from __future__ import annotations

from bigplan.spec.model import ModelSpec
from bigplan.spec.step import StepOp

_STEPS = {StepOp.NORM, StepOp.PRODUCT, StepOp.ROTARY, StepOp.ATTENTION}
_STEPS |= {StepOp.ACTIVATION, StepOp.SCALE, StepOp.SUM}


def uncovered(model: ModelSpec) -> list[str]:
    """What the model's blocks have that no graph has, in words; none: they are covered."""
    parts = {
        f"{model.experts} experts": model.experts > 0,
        "latent attention": model.latent_attention is not None,
        "norms without weights": model.weightless_norms != "none" or model.value_norm,
        "a factor of each block": model.block_scale,
        "an activation with trained numbers": model.mlp == "xielu",
    }
    if found := [name for name, there in parts.items() if there]:
        return found
    return [f"a {op}" for op in sorted({step.op for step in model.steps("block")} - _STEPS)]
