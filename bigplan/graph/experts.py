"""A block's experts on one rank: how tokens reach them and come back, and what that takes.

Counted on the runtime's functions (runtime/experts.py, runtime/mixture.py), which pass over all
scores by torch's operators, and over rows, a row being a token's copy for one of its experts, by
generated kernels or torch's operators.
"""

from __future__ import annotations

from bigplan.graph.graph import Tensor
from bigplan.graph.operators import Gemm, Stream
from bigplan.graph.shape import RankShape
from bigplan.spec.step import LayerStep, StepOp

# Bytes a score, and kernels. Forward: scores in fp32, their softmax, the k largest of them; then
# rows are sorted by expert. Backward: the softmax again, and its derivative; the balance's part.
ROUTED_BYTES, ROUTED_LAUNCHES = 18, 24
ROUTED_BACK_BYTES, ROUTED_BACK_LAUNCHES = 76, 28
# Tensors of gate's size that are read and written, and kernels. The forward is silu(gate), times
# up, times a weight; the backward computes it again, beside the gradients of all three.
WEIGHTED_PASSES, WEIGHTED_LAUNCHES = 3, 1  # generated
WEIGHTED_BACK_PASSES, WEIGHTED_BACK_LAUNCHES = 6, 1
EAGER_WEIGHTED, EAGER_WEIGHTED_LAUNCHES = 7, 3  # by torch's operators, one after the other
EAGER_WEIGHTED_BACK, EAGER_WEIGHTED_BACK_LAUNCHES = 24, 10
PLACES_LAUNCHES = 4  # the numbers that say where a row comes from, or goes to


def row_bytes(shape: RankShape) -> int:
    """Bytes of the rows that experts read, or give: a hidden state for each expert of a token."""
    return shape.model.experts_per_token * shape.whole_hidden


def inner_bytes(shape: RankShape) -> int:
    """Bytes of all rows' gate, up or inner values on a tensor-parallel rank."""
    (activation,) = shape.steps(StepOp.ACTIVATION)
    return shape.activation_shape.nbytes(activation.gives[0])


def grouped_product(shape: RankShape, step: LayerStep) -> Gemm:
    """The products of all rows with their experts' matrices, one launch for each value given."""
    (read,), given = step.reads, step.gives[0]
    return Gemm(
        step.name,
        shape.tokens * read.each,
        given.columns(shape.tp) // given.each,
        read.columns(shape.tp) // read.each,
        count=len(step.gives),
        groups=shape.model.experts,
        apart=not shape.grouped_kernels,
    )


def routing(shape: RankShape) -> tuple[tuple[Stream, Stream], ...]:
    """Choosing experts and copying tokens for them, forward and backward.

    The backward adds up and brings back the gradients by gate's and up's rows, and copies the rows
    again, of which the forward keeps none.
    """
    rows, scores, made = row_bytes(shape), shape.tokens * shape.model.experts, shape.generated
    back = _summed(shape, both=True) + 2 * rows
    return (
        (
            Stream("route", ROUTED_BYTES * scores, ROUTED_LAUNCHES),
            Stream("route", ROUTED_BACK_BYTES * scores, ROUTED_BACK_LAUNCHES),
        ),
        (
            Stream("sent", 2 * rows, PLACES_LAUNCHES, generated=made),
            Stream("sent", back, 2 * PLACES_LAUNCHES, generated=made),
        ),
    )


def combining(shape: RankShape, step: LayerStep) -> tuple[Stream, Stream]:
    """Adding up the rows of a token, and copying the gradient of their sum to all of them."""
    copied, made = 2 * row_bytes(shape), shape.generated
    return (
        Stream(step.name, _summed(shape), PLACES_LAUNCHES, generated=made),
        Stream(step.name, copied, PLACES_LAUNCHES, generated=made),
    )


def _summed(shape: RankShape, *, both: bool = False) -> int:
    """Bytes of adding up rows by token; `both`: those of two values.

    Torch's operators add the two first, and copy rows into the order of tokens before they are
    added up.
    """
    rows, tokens = row_bytes(shape), shape.whole_hidden
    if shape.generated:
        return (1 + both) * rows + tokens
    return 3 * both * rows + 3 * rows + tokens


def weighting(shape: RankShape, step: LayerStep) -> tuple[Stream, Stream]:
    """The gated activation of every row, times its weight."""
    forward = EAGER_WEIGHTED, EAGER_WEIGHTED_LAUNCHES
    backward = EAGER_WEIGHTED_BACK, EAGER_WEIGHTED_BACK_LAUNCHES
    if shape.generated:
        forward = WEIGHTED_PASSES, WEIGHTED_LAUNCHES
        backward = WEIGHTED_BACK_PASSES, WEIGHTED_BACK_LAUNCHES
    inner, made = inner_bytes(shape), shape.generated
    return (
        Stream(step.name, forward[0] * inner, forward[1], generated=made),
        Stream(step.name, backward[0] * inner, backward[1], generated=made),
    )


def gradient_bytes(shape: RankShape, tensors: tuple[Tensor, ...]) -> int:
    """Bytes of experts' gradients that live at once, before they are added to their sums.

    A grouped product makes those of one projection at once, in the compute dtype; products of
    single experts add to the sums themselves. Where autograd makes them, all live.
    """
    made = [tensor.elements for tensor in tensors if tensor.experts]
    if not shape.sums_in_products:
        return shape.element * sum(made)
    return shape.element * max(made) if shape.grouped_kernels else 0


def largest_bytes(shape: RankShape, tensors: tuple[Tensor, ...]) -> int:
    """Bytes of the largest tensor that a pass through the MLP makes, with experts or without."""
    made = (tensor.elements for tensor in tensors if tensor.experts and shape.grouped_kernels)
    return max(row_bytes(shape), inner_bytes(shape), shape.element * max(made, default=0))


def backward_workspace(shape: RankShape, tensors: tuple[Tensor, ...]) -> int:
    """Bytes that the backward of experts needs beyond what is saved, their activation among it.

    Within the activation, the gradients by it, by gate and by up live beside those of the rows; the
    activation itself is computed over the first. Torch's operators need two tensors more. Then
    comes a projection's gradient; at the end rows are added up by token.
    """
    rows, inner, made = row_bytes(shape), inner_bytes(shape), gradient_bytes(shape, tensors)
    within = rows + (2 if shape.generated else 4) * inner
    projection = rows + 2 * inner + made + shape.whole_hidden
    adding = 2 * inner + 2 * rows + shape.whole_hidden
    return max(within, projection, adding) + shape.gathered
