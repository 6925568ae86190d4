"""Adapters of a block's products on one rank: their operators, and no value of their own to keep.

All A of a product's adapters are one matrix, which reads the product's input once. Its result has
`rank` columns for each and is made again in the backward. The runtime adds each B's product to the
frozen product's result, and the gradient by the input to that of the frozen product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bigplan.graph.graph import Tensor
from bigplan.graph.operators import Gemm, Operator, Stream
from bigplan.graph.shape import RankShape, local_tensor
from bigplan.spec.lora import adapters
from bigplan.spec.step import LayerStep


def adapters_of(product: str) -> str:
    """The name of the operators of a product's adapters."""
    return f"{product} adapters"


def local_adapters(shape: RankShape) -> tuple[Tensor, ...]:
    """The adapters of one block on one rank, in the order of a forward."""
    return tuple(local_tensor(p, shape.tp) for p in adapters(shape.model, shape.training.lora))


def adapter_products(
    shape: RankShape, steps: Sequence[LayerStep]
) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """What the adapters of these steps do, forward and backward."""
    adapted = [step for step in steps if step.adapters]
    forward = tuple(one for step in adapted for one in _forward(shape, step))
    return forward, tuple(one for step in adapted for one in _backward(shape, step))


def _matrices(shape: RankShape, step: LayerStep) -> tuple[Tensor, list[Tensor]]:
    """All A as one matrix, and each B."""
    local = [local_tensor(parameter, shape.tp) for parameter in step.adapters]
    downs, ups = local[: len(local) // 2], local[len(local) // 2 :]
    return Tensor(step.name, sum(a.rows for a in downs), downs[0].columns), ups


def _narrow(shape: RankShape, step: LayerStep) -> Iterator[Operator]:
    """The product with all A, scaled."""
    down, _ = _matrices(shape, step)
    name = adapters_of(step.name)
    yield Gemm(name, shape.tokens, down.rows, down.columns)
    yield Stream(name, 2 * shape.tokens * down.rows * shape.element)


def _forward(shape: RankShape, step: LayerStep) -> Iterator[Operator]:
    name, (_, ups) = adapters_of(step.name), _matrices(shape, step)
    yield from _narrow(shape, step)
    for up in ups:
        yield Gemm(name, shape.tokens, up.rows, up.columns)
    yield _read(shape, name, sum(up.rows for up in ups))


def _backward(shape: RankShape, step: LayerStep) -> Iterator[Operator]:
    name, (down, ups) = adapters_of(step.name), _matrices(shape, step)
    yield from _narrow(shape, step)
    for up in ups:
        yield Gemm(f"{name} by input", shape.tokens, up.columns, up.rows)
        yield Gemm(f"{name} by weight", up.rows, up.columns, shape.tokens, of_rows=True)
    yield Stream(name, 2 * shape.tokens * down.rows * shape.element)
    yield Gemm(f"{name} by weight", down.rows, down.columns, shape.tokens, of_rows=True)
    yield Gemm(f"{name} by input", shape.tokens, down.columns, down.rows)
    yield _read(shape, name, down.columns)


def _read(shape: RankShape, name: str, columns: int) -> Stream:
    """A product that adds to its result reads it, too."""
    return Stream(name, shape.tokens * columns * shape.element, launches=0)
