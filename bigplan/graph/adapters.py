"""Adapters of a block's products on one rank: their operators, and no value of their own to keep.

All A of a product's adapters are one matrix, which reads the product's input once. Its result has
`rank` columns for each and is made again in the backward. The runtime adds each B's product to the
frozen product's result, and the gradient by the input to that of the frozen product. With dropout
each A reads the input by a mask of its own (runtime/linear/dropout.py): it has products of its own,
and a pass over the input; the backward also has one over the gradient by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from bigplan.graph import expert_adapters, plain_adapters
from bigplan.graph.graph import Tensor
from bigplan.graph.operators import Gemm, Operator, Stream
from bigplan.graph.shape import RankShape, held_tensor, local_tensor
from bigplan.spec.lora import adapters
from bigplan.spec.step import LayerStep, StepOp

# Torch's operators take as many times a copy's time to make a mask's words and apply it: 11 ns an
# element of fp32 on two busy cores, where a copy takes 1.5 to 3.8 (runtime/linear/dropout.py).
EAGER_MASK = 5.0

_Way = Callable[[RankShape, LayerStep, str], Iterator[Operator]]  # the name of its operators last


def adapters_of(product: str) -> str:
    """How the names of the operators of a product's adapters begin."""
    return f"{product} adapters"


def local_adapters(shape: RankShape) -> tuple[Tensor, ...]:
    """The adapters of one block on one rank, in the order of a forward."""
    return tuple(held_tensor(shape, p) for p in adapters(shape.model, shape.training.lora))


def adapter_products(
    shape: RankShape, steps: Sequence[LayerStep]
) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """What the adapters of these steps do, forward and backward."""
    adapted = [step for step in steps if step.adapters]
    ways = [(step, _ways(shape, step)) for step in adapted]
    forward = (one for step, (way, _) in ways for one in way(shape, step, adapters_of(step.name)))
    back = (one for step, (_, way) in ways for one in way(shape, step, adapters_of(step.name)))
    return tuple(forward), tuple(back)


def _ways(shape: RankShape, step: LayerStep) -> tuple[_Way, _Way]:
    """How the adapters of a step run, forward and backward."""
    if step.adapters[0].experts:
        return expert_adapters.forward, expert_adapters.backward
    if shape.plain_adapters:
        return plain_adapters.forward, plain_adapters.backward
    if shape.drops_adapters:
        return _dropped_forward, _dropped_backward
    return _forward, _backward


def _matrices(shape: RankShape, step: LayerStep) -> tuple[Tensor, Counter[tuple[int, int]]]:
    """All A as one matrix, and how many B have so many rows and columns."""
    local = [local_tensor(parameter, shape.tp) for parameter in step.adapters]
    downs, ups = local[: len(local) // 2], local[len(local) // 2 :]
    down = Tensor(step.name, sum(a.rows for a in downs), downs[0].columns)
    return down, Counter((up.rows, up.columns) for up in ups)


def _forward(shape: RankShape, step: LayerStep, name: str) -> Iterator[Operator]:
    """X A^T, scaled; of each B its product with that, added to what the frozen product gives."""
    tokens, (down, ups) = shape.tokens_of(step), _matrices(shape, step)
    yield Gemm(f"{name} A", tokens, down.rows, down.columns)
    for (rows, rank), count in ups.items():
        yield Gemm(f"{name} B", tokens, rows, rank, count=count)
    added = sum(rows * count for (rows, _), count in ups.items())
    yield Stream(name, tokens * (2 * down.rows + added) * shape.element)


def _backward(shape: RankShape, step: LayerStep, name: str) -> Iterator[Operator]:
    """X A^T again, for the gradient by B; the gradient by it, for those by A and by x."""
    tokens, (down, ups) = shape.tokens_of(step), _matrices(shape, step)
    yield Gemm(f"{name} A", tokens, down.rows, down.columns)
    for (rows, rank), count in ups.items():
        yield Gemm(f"{name} B by input", tokens, rank, rows, count=count)
        yield Gemm(f"{name} B by weight", rows, rank, tokens, count=count, of_rows=True)
    yield Gemm(f"{name} A by input", tokens, down.columns, down.rows)
    yield Gemm(f"{name} A by weight", down.rows, down.columns, tokens, of_rows=True)
    yield Stream(name, tokens * (4 * down.rows + down.columns) * shape.element, launches=2)


def _dropped_forward(shape: RankShape, step: LayerStep, name: str) -> Iterator[Operator]:
    """As `_forward`; each A reads what is left of X."""
    tokens, (down, ups), count = shape.tokens_of(step), _matrices(shape, step), _targets(step)
    yield Gemm(f"{name} A", tokens, down.rows // count, down.columns, count=count)
    for (rows, rank), times in ups.items():
        yield Gemm(f"{name} B", tokens, rows, rank, count=times)
    added = sum(rows * times for (rows, _), times in ups.items())
    yield Stream(name, tokens * (2 * down.rows + added) * shape.element, launches=count)
    yield _masking(shape, name, 2 * tokens * count * down.columns, count)


def _dropped_backward(shape: RankShape, step: LayerStep, name: str) -> Iterator[Operator]:
    """As `_backward`; what is left of X is made again, and of each gradient by it."""
    tokens, (down, ups), count = shape.tokens_of(step), _matrices(shape, step), _targets(step)
    rank = down.rows // count
    yield Gemm(f"{name} A", tokens, rank, down.columns, count=count)
    for (rows, _), times in ups.items():
        yield Gemm(f"{name} B by input", tokens, rank, rows, count=times)
        yield Gemm(f"{name} B by weight", rows, rank, tokens, count=times, of_rows=True)
    yield Gemm(f"{name} A by input", tokens, down.columns, rank, count=count)
    yield Gemm(f"{name} A by weight", rank, down.columns, tokens, count=count, of_rows=True)
    yield Stream(name, tokens * 4 * down.rows * shape.element, launches=2 * count)
    yield _masking(shape, name, (2 + 3) * tokens * count * down.columns, 2 * count)


def _masking(shape: RankShape, name: str, elements: int, launches: int) -> Stream:
    """What passes over so many elements by a mask."""
    nbytes, made = elements * shape.element, shape.generated
    return Stream(f"{name} dropout", nbytes, launches, EAGER_MASK, made)


def _targets(step: LayerStep) -> int:
    return len(step.adapters) // 2


def dropped_bytes(shape: RankShape) -> int:
    """Bytes of the largest input of adapters, of which what a mask leaves is a copy."""
    if not shape.drops_adapters or shape.plain_adapters:
        return 0
    steps = (step for step in shape.steps(StepOp.PRODUCT) if step.adapters)
    return max(
        (shape.tokens_of(s) * s.reads[0].columns(shape.tp) * shape.element for s in steps),
        default=0,
    )
