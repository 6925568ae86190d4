"""Experts' biases on one rank: products with one matrix (runtime/experts/biases.py)."""

from __future__ import annotations

from bigplan.graph.operators import Gemm, Operator, Stream, by_input, by_input_and_weight
from bigplan.graph.shape import RankShape
from bigplan.spec.step import LayerStep

# Kernels that make the vectors: rows' experts and zeros, or weights by choice, and the scatter.
VECTOR_LAUNCHES = 5
INDEX = 8  # bytes of a row's expert as the scatter wants it


def biases_of(step_name: str) -> str:
    """What operators of a product's biases are called, or begin with."""
    return f"biases of {step_name}"


def expert_biases(
    shape: RankShape, step: LayerStep
) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """Operators of the biases of a product of experts, forward and backward; none without.

    First biases are added to rows by the unit vectors of their experts, of which nobody asks for
    gradients; last ones to tokens by their weights. Frozen biases have no gradients.
    """
    if not (any(p.experts for p in step.parameters) and step.biased):
        return (), ()
    if shape.dispatched:
        return _by_megatron(shape, step)
    name, count, given = biases_of(step.name), len(step.gives), step.gives[0]
    rows, experts = shape.tokens * given.each, shape.model.experts
    columns = given.columns(shape.tp) // given.each
    last = not given.split
    if last:
        rows, experts = shape.tokens, experts // shape.tp
    product = Gemm(name, rows, columns, experts, count=count)
    both = by_input_and_weight((product,))
    back = by_input((product,)) if shape.frozen else both
    if not last:
        back = () if shape.frozen else both[1:]
    made = shape.element * rows * experts
    read = shape.element * count * rows * columns
    vectors = Stream(f"{name}, vectors", made, VECTOR_LAUNCHES)
    ahead = Stream(f"{name}, vectors", count * made + read, count * VECTOR_LAUNCHES)
    return (product, ahead), (*back, *([vectors] if back else []))


# Bytes of an element that an expert gives, and kernels, forward and backward: its bias times
# weights is made, added and joined with those of other experts, and the gradients of all three are
# taken (`TEGroupedMLP._apply_bias`). DeepEP and HybridEP know weights in fp32 alone, which makes
# all of this so.
BIASED_ROW, BIASED_ROW_WIDE, BIASED_ROW_LAUNCHES = (12, 16), (28, 40), (3, 6)


def _by_megatron(
    shape: RankShape, step: LayerStep
) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """Megatron Core's first biases are added by the product; last ones by torch, by expert."""
    (read,), given = step.reads, step.gives[0]
    if given.split:
        return (), ()
    moved = shape.routed * read.each * given.parts
    nbytes = BIASED_ROW_WIDE if shape.sends_once else BIASED_ROW
    ahead, back = (
        Stream(biases_of(step.name), each * moved, launches * shape.experts)
        for each, launches in zip(nbytes, BIASED_ROW_LAUNCHES, strict=True)
    )
    return (ahead,), (back,)


def vector_bytes(shape: RankShape) -> int:
    """Bytes of the vectors of all rows, while biases are added; 0 where there are none."""
    model = shape.model
    if not (model.experts and model.mlp_bias):
        return 0
    rows = shape.tokens * model.experts_per_token
    return rows * (model.experts * shape.element + INDEX)
