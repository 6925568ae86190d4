"""What passes from block to block beside the residual stream: bytes, and how it is made.

A micro-batch's own inputs of all blocks and the keys and values that blocks keep for others are on
the GPU from the embedding's forward to its backward. Gradients by inputs take the place of these.
Gradients by kept keys and values are fp32 sums, because several blocks add to them.
"""

from __future__ import annotations

from dataclasses import replace

from bigplan.graph.block import norm
from bigplan.graph.graph import LayerKind, Tensor
from bigplan.graph.operators import Gemm, Operator, Stream, by_input_and_weight
from bigplan.graph.shape import RankShape, gradient_sum, local_tensors
from bigplan.spec.carried import INPUTS_NORM, TO_INPUTS, handed_width, inputs_width

SUM = 4  # bytes of an element of a gradient by kept keys or values


def inputs_bytes(shape: RankShape) -> int:
    """Bytes of all blocks' own inputs of a micro-batch."""
    return shape.tokens * inputs_width(shape.model) * shape.element


def carried_bytes(shape: RankShape) -> int:
    """Bytes that a micro-batch has on the GPU beside the residual stream, as long as it lasts."""
    sums = shape.tokens * SUM * (handed_width(shape.model) - inputs_width(shape.model))
    return handed_bytes(shape) + sums


def handed_bytes(shape: RankShape) -> int:
    """Bytes of it that a message between stages has: all inputs, and all kept keys and values."""
    return shape.tokens * handed_width(shape.model) * shape.element


def embedding_tensors(shape: RankShape) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The embedding's tensors, without those for blocks' own inputs, and these."""
    every = local_tensors(shape, "embedding")
    own = tuple(t for t in every if t.name.startswith((TO_INPUTS, INPUTS_NORM)))
    return tuple(t for t in every if t not in own), own


def with_carried(shape: RankShape, embedding: LayerKind) -> LayerKind:
    """The embedding, which keeps what is carried and makes its part of blocks' own inputs.

    That is a product of embedded tokens, its norm, and their order by block, which the backward
    makes again.
    """
    embedding = replace(embedding, saved=embedding.saved + carried_bytes(shape))
    width, made = inputs_width(shape.model), inputs_bytes(shape)
    if not width:
        return embedding
    tensors, own = embedding_tensors(shape)
    product = Gemm("to inputs", shape.tokens, width, shape.model.hidden)
    steps = shape.model.steps("embedding")
    ahead, back = next(norm(shape, one) for one in steps if one.name == "norm of inputs")
    forward: tuple[Operator, ...] = (product, ahead, Stream("inputs by block", 2 * made))
    backward = (*forward, back, *by_input_and_weight((product,)), gradient_sum(shape, own))
    # Of the product, its norm and gradients of both; then of embedded tokens and of the weights.
    weights = shape.element * sum(tensor.elements for tensor in own)
    workspace = embedding.backward_workspace + 5 * made + 3 * shape.hidden + weights
    return replace(
        embedding,
        tensors=(*tensors, *own),
        forward=(*embedding.forward, *forward),
        backward=() if shape.frozen else (*backward, *embedding.backward),
        forward_workspace=embedding.forward_workspace + 3 * made,
        backward_workspace=0 if shape.frozen else workspace,
        largest=max(made, embedding.largest),
    )


def looked_up(shape: RankShape, tensors: tuple[Tensor, ...]) -> int:
    """Elements of a micro-batch's rows of these tables, or 0 where they exceed half of a table.

    On one GPU, rows are looked up in host memory if the tables live there
    (runtime/layers/lookup.py).
    """
    rows = shape.tokens * sum(tensor.columns for tensor in tensors)
    few = 2 * rows <= sum(tensor.elements for tensor in tensors)
    return rows if shape.strategy.ranks == 1 and few else 0
