"""Layers as steps from named values to named values, without element types.

All code that must agree on a layer reads the same steps: its parameters (ModelSpec.kinds), its
operators and the bytes it keeps (bigplan/graph). The runtime's functions (runtime/layers/blocks.py)
are written by hand; tests/runtime/layers/test_layers.py compares what they use, keep and compute
with the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

Split = Literal["rows", "columns", "replicated"]
TERMS = 3  # numbers in bf16, of 8 bits each, that add up to one in fp32, of 24


@dataclass(frozen=True)
class Parameter:
    """One tensor of a layer, stored [out, in] as torch.nn.Linear does.

    `split` is how Megatron's tensor parallelism splits it: "rows" (output), "columns" (input) or
    not at all. `decay` says whether weight decay applies. `heads` counts the key or value heads in
    its rows. A rank has whole heads; where there are fewer heads than ranks, neighbours have the
    same one. `experts` counts the experts that take turns in its rows: row j * experts + e is row j
    of expert e's matrix, or its column j where that leads back to the residual stream. So equal
    parts of the rows are equal parts of each expert. A `constant` is fp32 values that no gradient
    changes, in TERMS rows that add up to them, so that layers in 16 bits hold them exactly.
    """

    name: str
    shape: tuple[int, ...]
    split: Split
    decay: bool
    heads: int = 0
    experts: int = 0
    constant: bool = False
    filters: bool = False  # each row has the weights of a channel alone, so that it is no matrix

    @property
    def values(self) -> int:
        """Numbers of the model that it holds: its elements, unless several add up to one."""
        return self.count // TERMS if self.constant else self.count

    @property
    def count(self) -> int:
        """Elements."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns; a vector is one row. Of experts, rows that are their turn are one row.

        So whole experts are columns of it, and equal parts of every expert are rows.
        """
        *rows, columns = self.shape
        if self.experts:
            return rows[0] // self.experts, self.experts * columns
        return (rows[0] if rows else 1), columns

    def local(self, ranks: int, ep: int = 1) -> tuple[int, int]:
        """Rows and columns on one of `ranks` tensor-parallel ranks; rows of words are padded up.

        `ep`: so many ranks have whole experts each, an equal number.
        """
        rows, columns = self.matrix
        if self.experts and ep > 1:
            columns //= ep
        if self.split == "replicated":
            return rows, columns
        if self.cuts_columns:
            return rows, self._share(columns, ranks)
        return self._share(rows, ranks), columns

    def _share(self, size: int, ranks: int) -> int:
        parts = self.heads or size
        return -(-parts // ranks) * (size // parts)

    @property
    def cuts_columns(self) -> bool:
        """Whether ranks split the matrix's columns; for a vector of outputs, its elements."""
        return self.split == "columns" or (self.split == "rows" and len(self.shape) == 1)

    def holders(self, ranks: int) -> int:
        """Neighbours among `ranks` tensor-parallel ranks that hold the same part of it."""
        if self.split == "replicated":
            return ranks
        return max(1, ranks // self.heads) if self.heads else 1


class StepValue(NamedTuple):
    """A value that passes between steps, [tokens, parts * each].

    `split`: tensor-parallel ranks split the parts (heads, say), each at least one. Otherwise the
    value belongs to the residual stream: every rank has all of it, or with sequence parallelism its
    part of the tokens. `repeats`: where there are fewer parts than ranks, neighbours have the same
    one. `whole`: every rank has all tokens of it, also with sequence parallelism, and its own part
    of the gradient, as with what a router gives.
    """

    name: str
    parts: int
    each: int = 1
    split: bool = True
    repeats: bool = False
    whole: bool = False

    def columns(self, ranks: int = 1) -> int:
        """Elements a token on one of `ranks` tensor-parallel ranks."""
        return (-(-self.parts // ranks) if self.split else self.parts) * self.each


class StepOp(StrEnum):
    """What a step does."""

    LOOK_UP = "look-up"  # rows of a table, added to what it reads
    SCALE = "scale"  # a factor of what it reads
    NORM = "norm"
    PRODUCT = "product"  # of one value with a matrix for each value given
    ROUTE = "route"  # copies each token for each expert that it passes, one expert's behind another
    COMBINE = "combine"  # adds up what a token's experts give
    ROTARY = "rotary"  # turns what it reads by position
    ATTENTION = "attention"  # of queries, keys and values, in this order
    CONVOLUTION = "convolution"  # of what is gated before, after, and convolved, in this order
    DELTA_RULE = "delta rule"  # of queries, keys, values, gates, rates and decays, in this order
    STATE_SPACE = "state space"  # of gates, values, keys, queries and time steps, in this order
    GATE = "gate"  # a product of what is gated and a gate's sigmoid, in this order
    ACTIVATION = "activation"
    SUM = "sum"
    LOSS = "loss"


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One function of a layer."""

    op: StepOp
    name: str  # as operators are called
    reads: tuple[StepValue, ...]
    gives: tuple[StepValue, ...]
    parameters: tuple[Parameter, ...] = ()
    shared: str = ""  # the first layer's parameter that it reads in place of its own
    saves: tuple[StepValue, ...] = ()  # kept for its backward, in the compute dtype
    statistics: tuple[StepValue, ...] = ()  # also kept, always in fp32
    cheap: bool = False  # cheaper to run again than to keep; selective recomputation runs it again
    adapters: tuple[Parameter, ...] = ()  # trained beside frozen `parameters`: all A, then all B

    @property
    def beside_all(self) -> tuple[Parameter, ...]:
        """Parameters and adapters that every tensor-parallel rank applies to all of a value.

        Norms of heads are not among them, because each rank has its own heads, nor is a router,
        because each rank has its part of the gradient. With sequence parallelism there are none,
        because each rank has its own tokens.
        """
        if any(value.split or value.whole for value in self.gives):
            return ()
        whole = tuple(p for p in self.parameters if p.split == "replicated")
        return (*whole, *self.adapters) if len(whole) == len(self.parameters) else whole

    @property
    def biased(self) -> bool:
        """Whether a bias is added to its result."""
        return any(parameter.name.endswith(".bias") for parameter in self.parameters)


def linear(module: str, given: StepValue, x: StepValue, *, bias: bool) -> list[Parameter]:
    """A matrix, and its bias. That of a matrix split by columns is whole on every rank.

    It is added once to the sum over all ranks.
    """
    split: Split = "rows" if given.split else "columns"
    outputs, heads = given.columns(), given.parts if given.repeats else 0
    parameters = [Parameter(f"{module}.weight", (outputs, x.columns()), split, True, heads)]
    if bias:
        halves: Split = "rows" if given.split else "replicated"
        parameters.append(Parameter(f"{module}.bias", (outputs,), halves, False, heads))
    return parameters


def product(name: str, x: StepValue, modules: Mapping[str, StepValue], *, bias: bool) -> LayerStep:
    """Products of x with a matrix each, all in one kernel where that is faster.

    Matrices that give split values are split by rows, those that read one by columns.
    """
    parameters = [
        parameter
        for module, given in modules.items()
        for parameter in linear(module, given, x, bias=bias)
    ]
    given = tuple(modules.values())
    return LayerStep(StepOp.PRODUCT, name, (x,), given, tuple(parameters), saves=(x,))


def whole_product(name: str, x: StepValue, modules: Mapping[str, StepValue]) -> LayerStep:
    """Products of x with matrices that every tensor-parallel rank has whole."""
    matrices = tuple(
        Parameter(f"{module}.weight", (given.parts, x.columns()), "replicated", True)
        for module, given in modules.items()
    )
    return LayerStep(StepOp.PRODUCT, name, (x,), tuple(modules.values()), matrices, saves=(x,))
