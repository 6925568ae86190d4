"""A short convolution on one rank: what its ranks exchange, and what it moves and takes.

Counted on runtime/mixers/convolution.py: reads and writes of a vector of a token, of a rank's
channels, by plain torch or by the kernels of bigplan/kernels/handwritten/gated_filters.py.
"""

from __future__ import annotations

from bigplan.graph.operators import Collective, Stream
from bigplan.graph.shape import RankShape
from bigplan.mechanics import FILTERED_TOKENS, convolution_in_kernels
from bigplan.spec.step import LayerStep

# Forward: b v (two reads, a write); the product that begins the sum (a read, a write: filters are
# small); c times the sum, in place (two reads, a write). Backward: b v and the sum again, with the
# gradient by c (3 + 2 + 3); the gradient by the sum (3); zeros for that by b v (1); those by b and
# v (3 each).
FORWARD_PASSES, BACKWARD_PASSES = 3 + 2 + 3, 3 + 2 + 3 + 3 + 1 + 6
# Of each other tap, forward; of each tap backward: a product that is added up, and its gradient.
TAP_PASSES, TAP_PASSES_BACK = 3, 7
BIAS_PASSES, BIAS_PASSES_BACK = 2, 3
FORWARD_LAUNCHES, BACKWARD_LAUNCHES, TAP_LAUNCHES_BACK = 3, 8, 4
# Vectors of a token in the backward that the forward did not save: gradients by the result and by
# the sum, and two of the three vectors' beside the padded b v.
BACKWARD_VECTORS = 5
# In the forward: b v.
FORWARD_VECTORS = 1
# Of the kernels: b, c, v and the result; in the backward those three, the gradient by the result,
# and three. Beside them parts of the gradients by filters and bias are written and read again.
KERNEL_PASSES, KERNEL_PASSES_BACK = 4, 7
KERNEL_VECTORS_BACK = 4  # the gradients
FP32 = 4  # bytes


def convolved(shape: RankShape, step: LayerStep) -> tuple[Stream, Stream]:
    """The convolution forward and backward."""
    conv = shape.model.convolution
    assert conv is not None, shape.model.name
    moved, others = _vector(shape), conv.taps - 1
    if _by_kernels(shape):
        parts = 2 * FP32 * (conv.taps + 1) * moved / shape.element / FILTERED_TOKENS
        back = KERNEL_PASSES_BACK * moved + parts
        return (
            Stream(step.name, KERNEL_PASSES * moved, 1, generated=True),
            Stream(step.name, back, 4 + conv.bias, generated=True),
        )
    passes = FORWARD_PASSES + TAP_PASSES * others + BIAS_PASSES * conv.bias
    again = TAP_PASSES * others + TAP_PASSES_BACK * conv.taps
    passes_back = BACKWARD_PASSES + again + BIAS_PASSES_BACK * conv.bias
    hidden = 3 * others if shape.training.isolate_documents else 0  # products with masks
    launches_back = BACKWARD_LAUNCHES + others + TAP_LAUNCHES_BACK * conv.taps
    return (
        Stream(step.name, (passes + hidden) * moved, FORWARD_LAUNCHES + others),
        Stream(step.name, (passes_back + 2 * hidden) * moved, launches_back),
    )


def exchanges(shape: RankShape) -> tuple[Collective, ...]:
    """What context-parallel ranks send the next one, or in the backward the one before.

    It is an all-to-all with a part for each rank, of which one is read.
    """
    conv = shape.model.convolution
    assert conv is not None, shape.model.name
    if shape.cp == 1 or conv.taps == 1:
        return ()
    tokens = shape.strategy.micro_batch * (conv.taps - 1)
    nbytes = shape.cp * tokens * (shape.model.hidden // shape.tp) * shape.element
    return (Collective("convolution exchange", "all_to_all", nbytes),)


def forward_bytes(shape: RankShape) -> int:
    """Bytes that a forward takes beside what it saves."""
    return 0 if _by_kernels(shape) else FORWARD_VECTORS * _vector(shape)


def backward_bytes(shape: RankShape) -> int:
    """Bytes that the convolution's backward takes beyond what its forward saved."""
    vectors = KERNEL_VECTORS_BACK if _by_kernels(shape) else BACKWARD_VECTORS
    return vectors * _vector(shape)


def _by_kernels(shape: RankShape) -> bool:
    """Whether kernels convolve: whole sequences, of which each is one document."""
    conv = shape.model.convolution
    assert conv is not None, shape.model.name
    whole = shape.cp == 1 and not shape.training.isolate_documents
    return shape.generated and whole and convolution_in_kernels(shape.element, conv.taps)


def _vector(shape: RankShape) -> int:
    return shape.tokens * (shape.model.hidden // shape.tp) * shape.element
