"""What passes from block to block beside the residual stream: bytes, and how it is made.

A micro-batch's own inputs of all blocks and the keys and values that blocks keep for others are on
the GPU from the embedding's forward to its backward. Gradients by inputs take the place of these.
Gradients by kept keys and values are fp32 sums, because several blocks add to them.
"""

from __future__ import annotations

from typing import NamedTuple

from bigplan.graph.block import norm
from bigplan.graph.graph import Tensor
from bigplan.graph.operators import Gemm, Operator, Stream, by_input_and_weight
from bigplan.graph.shape import RankShape, gradient_sum, local_tensors
from bigplan.spec.carried import INPUTS_NORM, TO_INPUTS, keepers
from bigplan.spec.step import StepOp

SUM = 4  # bytes of an element of a gradient by kept keys or values


class ToInputs(NamedTuple):
    """What the embedding does for blocks' own inputs."""

    forward: tuple[Operator, ...] = ()
    backward: tuple[Operator, ...] = ()
    forward_bytes: int = 0  # that a pass makes and drops
    backward_bytes: int = 0


def inputs_bytes(shape: RankShape) -> int:
    """Bytes of all blocks' own inputs of a micro-batch."""
    return shape.tokens * shape.model.inputs_width * shape.element


def carried_bytes(shape: RankShape) -> int:
    """Bytes that a micro-batch has on the GPU beside the residual stream, as long as it lasts."""
    model, kinds = shape.model, shape.model.block_kinds
    widths = (2 * model.seen_by(kinds[number]).kv_width for number in keepers(model))
    return inputs_bytes(shape) + shape.tokens * sum(widths) * (shape.element + SUM)


def to_inputs(shape: RankShape) -> ToInputs:
    """The product of embedded tokens, its norm, and their order by block; the backward runs them
    again.
    """
    width, made = shape.model.inputs_width, inputs_bytes(shape)
    if not width:
        return ToInputs()
    product = Gemm("to inputs", shape.tokens, width, shape.model.hidden)
    (step,) = (
        step
        for step in shape.model.steps("embedding")
        if step.op is StepOp.NORM and step.parameters[0].name.startswith(INPUTS_NORM)
    )
    ahead, back = norm(shape, step)
    ordered = Stream("inputs by block", 2 * made)
    own = tuple(t for t in local_tensors(shape, "embedding") if t.name.startswith(TO_INPUTS))
    forward = (product, ahead, ordered)
    backward = (product, ahead, ordered, back, *by_input_and_weight((product,)))
    return ToInputs(
        forward,
        (*backward, gradient_sum(shape, own)),
        3 * made,
        5 * made + 3 * shape.hidden + shape.element * sum(tensor.elements for tensor in own),
    )


def looked_up(shape: RankShape, tensors: tuple[Tensor, ...]) -> int:
    """Elements of a micro-batch's rows of these tables, or 0 where they exceed half of a table.

    On one GPU, rows are looked up in host memory if the tables live there
    (runtime/layers/lookup.py).
    """
    rows = shape.tokens * sum(tensor.columns for tensor in tensors)
    few = 2 * rows <= sum(tensor.elements for tensor in tensors)
    return rows if shape.strategy.ranks == 1 and few else 0
