"""Adapters as other tools run them, by operators of plain torch.

`Linear.forward` of peft's lora/layer.py adds `lora_B(lora_A(dropout(x))) * scaling` to what the
frozen layer gives, for each matrix apart. Megatron's (`ParallelLinearAdapter` of NeMo and
Megatron-Bridge) does the same for a product of several matrices, with one A and one B for all.
Autograd keeps what each A reads and gives. Frozen matrices in 4 bits are bitsandbytes', whose
kernels unpack a matrix into the compute dtype; peft copies what such a product gives before it adds
to it (`Linear4bit.forward` of lora/bnb.py), so that nothing is written into a view.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigplan.graph.operators import Gemm, Operator, Stream
from bigplan.graph.shape import RankShape, local_tensor
from bigplan.spec.step import LayerStep, StepOp

# Kernels of bitsandbytes for a matrix whose scales are in 8 bits, too: scales, their mean, codes
# (`dequantize_4bit` of functional.py).
UNPACKING_LAUNCHES = 3
CLONE = 2  # passes of `result.clone()`, which peft takes before it adds to a product of 4 bits
MASK = 1  # byte an element of a dropout's mask


@dataclass(frozen=True, slots=True)
class _Pair:
    """An A and a B on one rank."""

    inner: int
    rank: int
    outer: int


def _pairs(shape: RankShape, step: LayerStep) -> list[_Pair]:
    local = [local_tensor(parameter, shape.tp) for parameter in step.adapters]
    half = len(local) // 2
    pairs = zip(local[:half], local[half:], strict=True)
    apart = [_Pair(a.columns, a.rows, b.rows) for a, b in pairs]
    if shape.plain_adapters == "apart" or not apart:
        return apart
    first = apart[0]
    return [_Pair(first.inner, first.rank, sum(one.outer for one in apart))]


def _copies(shape: RankShape) -> bool:
    """Whether a frozen product's result is copied before an adapter's is added to it."""
    lora = shape.training.lora
    packed = lora is not None and lora.frozen is not None
    return packed and shape.plain_adapters == "apart"


def forward(shape: RankShape, step: LayerStep, name: str) -> Iterator[Operator]:
    """Dropout, A, B, the factor, and the sum with the frozen product's result, or a copy of it."""
    tokens, element = shape.tokens_of(step), shape.element
    for one in _pairs(shape, step):
        yield Gemm(f"{name} A", tokens, one.rank, one.inner)
        yield Gemm(f"{name} B", tokens, one.outer, one.rank)
        dropped = 2 * element + MASK if shape.drops_adapters else 0
        copied = CLONE if _copies(shape) else 0
        moved = tokens * (dropped * one.inner + (2 + 3 + copied) * element * one.outer)
        yield Stream(name, moved, 2 + bool(dropped) + bool(copied))


def backward(shape: RankShape, step: LayerStep, name: str) -> Iterator[Operator]:
    """The gradient times the factor, four products, dropout's, and the sum of x's gradients."""
    tokens, element = shape.tokens_of(step), shape.element
    for one in _pairs(shape, step):
        yield Gemm(f"{name} B by input", tokens, one.rank, one.outer)
        yield Gemm(f"{name} B by weight", one.outer, one.rank, tokens, of_rows=True)
        yield Gemm(f"{name} A by input", tokens, one.inner, one.rank)
        yield Gemm(f"{name} A by weight", one.rank, one.inner, tokens, of_rows=True)
        dropped = 2 * element + MASK if shape.drops_adapters else 0
        moved = tokens * (2 * element * one.outer + (dropped + 3 * element) * one.inner)
        yield Stream(name, moved, 2 + bool(dropped))


def kept_bytes(shape: RankShape) -> int:
    """What autograd keeps of a block's adapters beyond the inputs of its steps."""
    if not shape.plain_adapters:
        return 0
    kept = 0
    for step in shape.steps(StepOp.PRODUCT):
        for one in _pairs(shape, step):
            dropped = (shape.element + MASK) * one.inner if shape.drops_adapters else 0
            kept += shape.tokens_of(step) * (dropped + shape.element * one.rank)
    return kept
