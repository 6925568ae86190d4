"""The steps of a block that mixes tokens by a state space (bigplan/spec/mixers.py).

Products of the residual stream give each token's gates, values, keys, queries and time steps.
Tensor-parallel ranks split all of it by heads. Keys and queries are a group's: ranks split groups,
or all have the only one.
"""

from __future__ import annotations

from bigplan.spec.architecture import Architecture
from bigplan.spec.mixers import OUTPUTS, STATE_SPACE, StateSpace
from bigplan.spec.step import LayerStep, Parameter, StepOp, StepValue, product

GATES, VALUES = "space.z_proj", "space.x_proj"
KEYS, QUERIES = "space.b_proj", "space.c_proj"
STEPS = "space.dt_proj"
CONVOLVED = ("space.x_conv", "space.b_conv", "space.c_conv")  # values, keys, queries
LOG_DECAY, STEP_OFFSET, SKIP = "space.A_log", "space.dt_bias", "space.D"
NORM = "space.norm.weight"
INPUT, OUTPUT = "state_space input", "state_space output"  # names of the products


def state_space(model: Architecture, x: StepValue) -> list[LayerStep]:
    """What makes heads and groups of x, runs the recurrence, and leads back."""
    space = model.state_space
    assert space is not None, model.name
    modules = {
        GATES: StepValue("space's gates", space.heads, space.head_dim),
        VALUES: StepValue("space's values", space.heads, space.head_dim),
        KEYS: StepValue("space's keys", space.groups, space.state, repeats=True),
        QUERIES: StepValue("space's queries", space.groups, space.state, repeats=True),
        STEPS: StepValue("time steps", space.heads),
    }
    read = tuple(modules.values())
    mixed = StepValue("state space's values", space.heads, space.head_dim)
    parameters = (*_filters(space, read[1:4]), *_of_heads(space))
    core = LayerStep(StepOp.STATE_SPACE, STATE_SPACE, read, (mixed,), parameters, saves=read)
    output = {OUTPUTS[STATE_SPACE]: StepValue(OUTPUT, model.hidden, split=False)}
    return [
        product(INPUT, x, modules, bias=space.bias),
        core,
        product(OUTPUT, mixed, output, bias=space.bias),
    ]


def _filters(space: StateSpace, convolved: tuple[StepValue, ...]) -> list[Parameter]:
    """Of the convolution: filters of each value's channels, and their biases."""
    found = []
    for name, value in zip(CONVOLVED, convolved, strict=True):
        channels, shared = value.columns(), value.parts if value.repeats else 0
        shape = channels, space.taps
        found.append(Parameter(f"{name}.weight", shape, "rows", True, shared, filters=True))
        if space.convolution_bias:
            found.append(Parameter(f"{name}.bias", (channels,), "rows", False, shared))
    return found


def _of_heads(space: StateSpace) -> list[Parameter]:
    """Numbers of each head, and the weight of the norm, if any."""
    numbers = (LOG_DECAY, STEP_OFFSET, SKIP)
    found = [Parameter(name, (space.heads,), "rows", False) for name in numbers]
    return [*found, Parameter(NORM, (space.width,), "rows", False)] if space.norm else found
