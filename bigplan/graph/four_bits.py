"""Matrices of blocks that are stored in 4 bits: each product unpacks those that it reads."""

from __future__ import annotations

from collections.abc import Iterable

from bigplan.graph.operators import Stream
from bigplan.graph.plain_adapters import UNPACKING_LAUNCHES
from bigplan.graph.shape import RankShape, held_tensor
from bigplan.spec.four_bits import is_packed, packed_columns
from bigplan.spec.step import LayerStep, Parameter, StepOp

# Bytes that plain torch moves for an element, as a multiple of the kernel's 2.5: codes and values
# become int32 and fp32 tensors on the way (runtime/linear/four_bits.py), 36 bytes.
EAGER_UNPACKING = 14.0
EAGER_BYTES = 12  # an element of these, while they live beside each other


def _matrices(step: LayerStep) -> list[Parameter]:
    return [parameter for parameter in step.parameters if is_packed(parameter)]


def _packed(shape: RankShape) -> bool:
    """Whether the blocks' matrices are stored in 4 bits."""
    lora = shape.training.lora
    return lora is not None and lora.frozen is not None


def unpacking(shape: RankShape, products: Iterable[LayerStep]) -> tuple[Stream, ...]:
    """One pass over what each product reads, before its forward as before its backward."""
    return tuple(_unpacked(shape, step) for step in products if _packed(shape) and _matrices(step))


def _unpacked(shape: RankShape, step: LayerStep) -> Stream:
    nbytes = 0
    for matrix in _matrices(step):
        local = held_tensor(shape, matrix)
        columns = local.columns + packed_columns(local.columns, shape.element)
        nbytes += shape.element * local.rows * columns
    launches = len(_matrices(step))
    if shape.plain_adapters:
        return Stream(step.name, nbytes, launches * UNPACKING_LAUNCHES)
    return Stream(step.name, nbytes, launches, EAGER_UNPACKING, shape.generated)


def unpacked_bytes(shape: RankShape) -> int:
    """Bytes of the largest matrix that a product unpacks; each is gone before the next."""
    if not _packed(shape):
        return 0
    steps = shape.steps(StepOp.PRODUCT)
    largest = max(held_tensor(shape, m).elements for step in steps for m in _matrices(step))
    by_kernel = shape.generated or shape.plain_adapters
    return largest * (shape.element + (0 if by_kernel else EAGER_BYTES))
