"""The steps of an MLP that all tokens pass, of a block without experts."""

from __future__ import annotations

from bigplan.spec.architecture import Architecture
from bigplan.spec.step import LayerStep, StepOp, StepValue, product
from bigplan.spec.xielu import xielu_numbers


def entering(model: Architecture) -> tuple[str, ...]:
    """What MLPs make of what they read, by names of matrices."""
    return ("gate", "up") if model.gated else ("up",)


def mlp(model: Architecture, x: StepValue) -> list[LayerStep]:
    """A gated MLP, or one with a plain activation. ReLU's derivative needs only its output.

    A factor of the gate makes another value of it, which is kept in its place.
    """
    modules = {f"{name}_proj": StepValue(name, model.ffn) for name in entering(model)}
    inner, inputs = StepValue("inner", model.ffn), tuple(modules.values())
    steps = [product("mlp up", x, modules, bias=model.mlp_bias)]
    if model.gate_scale != 1:
        gate, up = inputs
        inputs = (gate._replace(name="scaled gate"), up)
        steps.append(LayerStep(StepOp.SCALE, "gate scale", (gate,), inputs[:1]))
    by_output = model.mlp == "relu"
    saved = (inner,) if by_output else inputs
    activation = LayerStep(
        StepOp.ACTIVATION,
        "activation",
        inputs,
        (inner,),
        xielu_numbers() if model.mlp == "xielu" else (),
        saves=saved,
        cheap=not by_output,
    )
    output = {"down_proj": StepValue("mlp output", model.hidden, split=False)}
    return [*steps, activation, product("mlp down", inner, output, bias=model.mlp_bias)]
