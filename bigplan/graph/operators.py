"""Operators of a layer, one kernel or a few each: the shapes that a cost model prices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bigplan.mechanics import worth_apart
from bigplan.spec.gpu import FlashKernel

Pattern = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


ALIGNED = 8  # elements of 16 bits in a 16-byte load, which tensor-core kernels want


@dataclass(frozen=True, slots=True)
class Gemm:
    """`batch` matrix products [m, k] x [k, n] in one launch, `count` launches.

    `of_rows`: k counts rows of both inputs, as in a weight's gradient, where it is the tokens.
    `groups`: each row belongs to one of so many matrices [k, n], as of experts, and nobody knows
    how many belong to each before they run; with `of_rows` each group has a result of its own.
    `fp8`, `fp4` and `fp32`: so in every precision of a training.
    `apart`: each group's product is a launch, and the host waits to know its rows.
    `scaled_rows`: it is torch's grouped product in fp8, whose factors have a scale for each row.
    `inside`: of a kernel that also moves what it reads and writes, and is a Stream for that.
    """

    name: str
    m: int
    n: int
    k: int
    batch: int = 1
    count: int = 1
    fp8: bool = False
    fp4: bool = False
    fp32: bool = False
    of_rows: bool = False
    groups: int = 1
    apart: bool = False
    scaled_rows: bool = False
    inside: bool = False

    @property
    def launches(self) -> int:
        """Kernels."""
        return 0 if self.inside else self.count * (self.groups if self.apart else 1)

    @property
    def long(self) -> bool:
        """Whether a group's product lets the host work beside it, once that knows its rows."""
        return worth_apart(self.m / self.groups, self.n, self.k)

    @property
    def inner(self) -> float:
        """Products that an element of the result is the sum of, on average over groups."""
        return self.k / self.groups if self.of_rows else self.k

    @property
    def results(self) -> int:
        """Elements of a launch's output, of all groups' launches together."""
        return self.m * self.n * self.batch * (self.groups if self.of_rows else 1)

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Elements of a row of each input and of the output, as they lie in memory.

        A layer's tokens are rows and no row's length. A batch's products have all three, as scores
        are read and written both ways.
        """
        if self.batch > 1:
            return self.m, self.n, self.k
        return (self.m, self.n) if self.of_rows else (self.n, self.k)

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.m * self.n * self.k * self.batch * self.count

    @property
    def elements(self) -> int:
        """Elements of both inputs and of the output, as they pass memory."""
        if self.inside:
            return 0
        factors = self.m * self.k + self.k * self.n * (1 if self.of_rows else self.groups)
        return (factors * self.batch + self.results) * self.count


def by_input(gemms: tuple[Gemm, ...]) -> tuple[Gemm, ...]:
    """The backward of a linear layer whose weight is frozen."""
    return tuple(replace(g, name=f"{g.name} by input", n=g.k, k=g.n) for g in gemms)


def by_input_and_weight(gemms: tuple[Gemm, ...]) -> tuple[Gemm, ...]:
    """The two products of a linear layer's backward: by the input and by the weight."""
    by_weight = (
        replace(g, name=f"{g.name} by weight", m=g.n, n=g.k, k=g.m, of_rows=True) for g in gemms
    )
    return (*by_input(gemms), *by_weight)


def doubled_reach(length: int, window: int | None) -> float:
    """Twice the tokens that a token of a sequence attends to, on average over the sequence.

    Token x attends to min(x, window) tokens. The diagonal counts as half, as in the triangle of a
    whole sequence, where this is the length: 2 / s * integral of min(x, w) = 2 w - w^2 / s.
    """
    reach = min(length, window or length)
    return 2.0 * reach - reach * reach / length


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused causal attention.

    `flops` counts the triangle of scores below the diagonal, or what a window leaves of it;
    `nbytes` is what the kernel moves. Where some blocks alone have it, both are means over all
    blocks, and a block launches one of its operators.
    """

    name: str
    flops: float
    nbytes: float = 0.0
    backward: bool = False
    head_dim: int = 128
    length: int = 1 << 20  # tokens of the sequence, or of its documents that are kept apart
    kernel: FlashKernel | None = None  # the kernel that does it; None: the run's choice
    window: int | None = None  # tokens that a token attends to at most; None: all before it
    launches: int = 1
    edges: float = 1.0  # of sequences without a window, each half a tile of a query's row
    fp8: bool = False  # its products are in MXFP8
    fills: float = 1.0  # times that a row of tiles is filled and drained, over a whole sequence's


@dataclass(frozen=True, slots=True)
class Stream:
    """Memory-bound kernels that move `nbytes` through device memory.

    `eager`: factors of bytes and of launches where the operator is a chain of plain torch kernels
    instead of a fused one. `generated`: the operator is a kernel of bigplan/kernels, which Python
    launches. `in_turn`: it is several short ones, each of which needs all of the one before, so the
    GPU waits for the start of each. Of other operators the rates have that start in them.
    """

    name: str
    nbytes: float
    launches: int = 1
    eager: float = 1.0
    generated: bool = False
    in_turn: bool = False


@dataclass(frozen=True, slots=True)
class Collective:
    """Collectives of `nbytes` (the whole tensor) over the tensor-parallel group.

    An all-to-all is of the context-parallel group, and of the bytes that a rank has: it sends each
    other rank an equal part of them. With `rows` it is of the expert-parallel group, and the bytes
    are so many rows for each token, which go to as many experts; `groups`: of so many groups of
    experts, the token's are in so many.

    `hidden`: a GEMM that does not depend on it runs at the same time. `beside`: the GEMM of the
    same pass that some frameworks run at the same time. `exposed`: no framework pipelines it with a
    GEMM. `waits`: the host waits for what it brings.
    """

    name: str
    pattern: Pattern
    nbytes: int
    count: int = 1
    hidden: bool = False
    beside: str = ""
    exposed: bool = False
    rows: int = 0
    groups: tuple[int, int] = (1, 1)
    waits: bool = False


Operator = Gemm | Attention | Stream | Collective
