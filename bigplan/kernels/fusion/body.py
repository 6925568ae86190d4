"""What a kernel computes at one position: operators taken apart into arithmetic on tiles.

A kernel's domain is `rows` x `width`. Every value varies with both (FULL), with the row (ROW), with
the column (COLUMN) or with neither (ONE). If a tensor's rows are several times `width`, it counts
as several pieces: rotary's halves, or a gate beside its up projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from bigplan.kernels.fusion.graph import KernelValue

ROW_REDUCTIONS = ("sum_row", "max_row", "lse_row")  # the last: log of the sum of exponentials


class Varies(StrEnum):
    """What a value varies with."""

    FULL = "full"
    ROW = "row"
    COLUMN = "column"
    ONE = "one"


class Place(NamedTuple):
    """Where a tensor's elements lie: row r is split by `sizes` (row-major), each by its stride."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    step: int  # from a column to the next
    offset: int


@dataclass(frozen=True, slots=True)
class Micro:
    """One operation; arguments are indices of earlier ones."""

    op: str
    arguments: tuple[int, ...]
    varies: Varies
    number: float = 0.0  # of "number"
    source: str = ""  # of "load" and "gather": the tensor's name
    place: Place | None = None  # of them


class Val(NamedTuple):
    """A tensor of the graph inside the kernel: what it varies with, piece by piece."""

    shape: tuple[int, ...]
    varies: Varies
    pieces: tuple[int, ...]


class OutputPiece(NamedTuple):
    """A piece written to an output."""

    value: KernelValue
    micro: int
    place: Place
    varies: Varies


@dataclass(frozen=True)
class Body:
    """A kernel before it has a tile."""

    rows: int
    width: int
    micros: tuple[Micro, ...]
    inputs: tuple[KernelValue, ...]
    stores: tuple[OutputPiece, ...]
    outputs: tuple[KernelValue, ...]

    def of(self, op: str) -> list[int]:
        """Indices of the operations called so."""
        return [i for i, micro in enumerate(self.micros) if micro.op == op]

    @property
    def row_reductions(self) -> list[int]:
        """Indices of those that reduce rows."""
        return [i for i, micro in enumerate(self.micros) if micro.op in ROW_REDUCTIONS]


def join(*kinds: Varies) -> Varies:
    """What a result varies with."""
    found = {kind for kind in kinds if kind is not Varies.ONE}
    if len(found) > 1 or Varies.FULL in found:
        return Varies.FULL
    return next(iter(found), Varies.ONE)


class Domain(NamedTuple):
    """Rows and columns of a kernel."""

    rows: int
    width: int
    flat: bool = False  # all elements as one row, where nothing is broadcast or reduced
    channels_last: bool = False  # columns are the channels of [n, c, h, w]
