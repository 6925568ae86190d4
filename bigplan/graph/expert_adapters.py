"""Adapters of experts' matrices on one rank: grouped products of rows, as of the experts.

Each of experts' matrices has its own A and B, which read its rows by themselves. What A gives is
made again in the backward (runtime/experts/adapters.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.graph.experts import inner_bytes, row_bytes
from bigplan.graph.operators import Gemm, Operator, Stream
from bigplan.graph.shape import RankShape
from bigplan.mechanics import groups_in_one
from bigplan.spec.lora import OF_SENT
from bigplan.spec.step import LayerStep, StepOp


class _Sizes:
    """Rows of a product of experts, and the columns that a rank's adapters of it read and give."""

    def __init__(self, shape: RankShape, step: LayerStep, name: str) -> None:
        read, given = step.reads[0], step.gives[0]
        lora = shape.training.lora
        assert lora is not None, "adapters are trained"
        self.name, self.rank, self.count = name, lora.rank, len(step.adapters) // 2
        self.rows = shape.tokens * read.each
        self.read = read.columns(shape.tp) // read.each
        self.given = given.columns(shape.tp) // given.each
        self._shape = shape

    def product(self, name: str, n: int, k: int) -> Gemm:
        """Of rows of k columns with a matrix [k, n] of each expert."""
        shape = self._shape
        in_one = shape.grouped and shape.training.precision == "bf16"
        in_one = in_one and groups_in_one(shape.experts, n, k)
        return Gemm(
            f"{self.name} {name}",
            self.rows,
            n,
            k,
            count=self.count,
            groups=shape.experts,
            apart=not in_one,
        )

    def by_weight(self, name: str, m: int, n: int) -> Gemm:
        """The gradients [m, n] of all experts' matrices."""
        one = self.product(name, n, m)
        return Gemm(
            one.name,
            m,
            n,
            self.rows,
            count=one.count,
            of_rows=True,
            groups=one.groups,
            apart=one.apart,
        )

    def stream(self, columns: int, launches: int) -> Stream:
        """What passes over so many columns of all rows, for each of the matrices."""
        nbytes = self.count * self.rows * columns * self._shape.element
        return Stream(self.name, nbytes, self.count * launches)


def forward(shape: RankShape, step: LayerStep, name: str) -> Iterator[Operator]:
    """X A^T, scaled; its product with B, added to what the frozen product gives."""
    sizes = _Sizes(shape, step, name)
    yield sizes.product("A", sizes.rank, sizes.read)
    yield sizes.product("B", sizes.given, sizes.rank)
    yield sizes.stream(2 * sizes.rank + 3 * sizes.given, launches=2)


def backward(shape: RankShape, step: LayerStep, name: str) -> Iterator[Operator]:
    """X A^T again, for the gradient by B; the gradient by it, for those by A and by x.

    The gradient by it is made for each of these two.
    """
    sizes = _Sizes(shape, step, name)
    yield sizes.product("A", sizes.rank, sizes.read)
    for _ in range(2):
        yield sizes.product("B by input", sizes.rank, sizes.given)
    yield sizes.by_weight("B by weight", sizes.given, sizes.rank)
    yield sizes.product("A by input", sizes.read, sizes.rank)
    yield sizes.by_weight("A by weight", sizes.rank, sizes.read)
    yield sizes.stream(6 * sizes.rank + 3 * sizes.read, launches=4)


def _enters(step: LayerStep) -> bool:
    """Whether a product reads what a router sends."""
    return any(adapter.name.startswith(OF_SENT) for adapter in step.adapters)


def forward_bytes(shape: RankShape) -> int:
    """Bytes of what B's product gives, before it is added to what experts' first matrices gave."""
    return inner_bytes(shape) if any(map(_enters, shape.steps(StepOp.PRODUCT))) else 0


def backward_bytes(shape: RankShape) -> int:
    """Bytes of what A's product gives the gradient by rows, before it is added to theirs."""
    return row_bytes(shape) if any(map(_enters, shape.steps(StepOp.PRODUCT))) else 0
