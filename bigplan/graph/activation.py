"""The activation of an MLP that all tokens pass: what it moves, and what it takes meanwhile."""

from __future__ import annotations

from bigplan.graph.experts import inner_bytes
from bigplan.graph.operators import Stream
from bigplan.graph.shape import RankShape
from bigplan.spec.step import LayerStep
from bigplan.spec.xielu import AT_ONCE, LIVE

# Times a fused kernel's bytes that torch's operators move: SwiGLU's silu and product take 5 and 9
# passes instead of 3 and 5, as GeGLU's do.
EAGER_ACTIVATION = {
    "swiglu": (1.67, 1.8),
    "geglu": (1.67, 1.8),
    "gelu": (1.0, 1.0),
    "gelu_tanh": (1.0, 1.0),
    "relu": (1.0, 1.0),
    "relu2": (2.0, 2.33),  # 4 passes in place of 2, and 7 of 3
    "xielu": (25.5, 28.7),  # 102 bytes an element in place of 4, and 172 of 6: it is fp32 inside
}


def activation(shape: RankShape, step: LayerStep) -> tuple[Stream, Stream]:
    """Its passes forward and backward."""
    forward, backward = EAGER_ACTIVATION[shape.model.mlp]
    width, passes = shape.activation_shape.nbytes(step.gives[0]), len(step.reads)
    return (
        Stream(step.name, (passes + 1) * width, 1, forward, shape.generated),
        Stream(step.name, (2 * passes + 1) * width, 1, backward, shape.generated),
    )


def activation_bytes(shape: RankShape) -> int:
    """What torch's operators make of a part of an activation's elements."""
    if shape.model.mlp != "xielu" or shape.generated:
        return 0
    return 4 * LIVE * min(AT_ONCE, inner_bytes(shape) // shape.element)
