"""The steps that make blocks' own inputs: those of the embedding, and of all blocks' tables."""

from __future__ import annotations

from bigplan.spec.architecture import Architecture
from bigplan.spec.carried import INPUTS_NORM, TABLES, TO_INPUTS
from bigplan.spec.step import LayerStep, Parameter, StepOp, StepValue


def to_inputs(model: Architecture, embedded: StepValue) -> list[LayerStep]:
    """What the embedding adds to blocks' own inputs: a product, normed for each block.

    Nothing of it is kept: the backward does all of it again from tokens.
    """
    if model.block_inputs is None:
        return []
    made = StepValue("to inputs", model.layers, model.block_inputs.width, split=False)
    weight = Parameter(f"{TO_INPUTS}.weight", (made.columns(), model.hidden), "rows", True)
    scale = Parameter(f"{INPUTS_NORM}.weight", (model.block_inputs.width,), "replicated", False)
    normed = made._replace(name="normed to inputs")
    return [
        LayerStep(StepOp.PRODUCT, "to inputs", (embedded,), (made,), (weight,)),
        LayerStep(StepOp.NORM, "norm of inputs", (made,), (normed,), (scale,)),
    ]


def inputs(model: Architecture) -> tuple[LayerStep, ...]:
    """Rows of all blocks' tables, added to what the embedding made."""
    assert model.block_inputs is not None
    rows = StepValue("inputs", model.layers, model.block_inputs.width, split=False)
    table = Parameter(TABLES, (model.vocab, rows.columns()), "rows", True)
    return (LayerStep(StepOp.LOOK_UP, "look-up", (), (rows,), (table,)),)
