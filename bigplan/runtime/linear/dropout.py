"""Dropout of what low-rank adapters read, by masks that nobody keeps.

An adapter reads x with some elements as 0: y = x W^T + s / (1 - rate) (mask * x) A^T B^T, so that
its mean is that without dropout. As in peft each target has a mask of its own, and evaluation none.
Whether an element is dropped is a function of whole numbers alone: the seed, the layer, the target,
the sequence's number in the training, which counts the step too, the token's position and the
column. So a mask is the same wherever it is made again: in a backward, under any recomputation, by
any rank, in a run that goes on. bigplan/kernels/handwritten/dropout.py has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from bigplan.runtime.hashing import WORD, mixed
from bigplan.runtime.linear.adapters import Adapters

# Odd factors of a sequence's number, a position and a column, before they are mixed.
OF_SEQUENCE, OF_POSITION, OF_COLUMN = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
# Elements that have words of 64 bits at once. A CPU's caches hold those of 2^14: 8 M elements took
# 11 ns each on two cores, and 55 to 78 with larger parts. On a GPU 2^20 of them take 8 MB.
ON_CPU, ON_GPU = 1 << 14, 1 << 20


class Draw(NamedTuple):
    """What decides which elements of a matrix [rows, columns] are dropped."""

    first: Tensor  # int64 [1]: the micro-batch's first sequence among all of the training
    words: tuple[int, int]  # of the layer and the target, for rows and for columns
    least: int  # an element whose word is below is dropped
    row: int  # of the micro-batch's tokens, the first one's number
    column: int  # of the input's columns, the first one's number
    length: int  # tokens that this rank has of a sequence
    start: int  # of these, the first one's position


# Gives x [rows, columns] with zeros for what is dropped; with `into` it is added to that, in place.
Dropping = Callable[[Tensor, Draw, Tensor | None], Tensor]


def dropped(x: Tensor, draw: Draw, into: Tensor | None = None) -> Tensor:
    """As Dropping, by torch's operators."""
    found = torch.zeros_like(x) if into is None else into
    of_rows, of_columns = _words(x, draw)
    step = max(1, (ON_CPU if x.device.type == "cpu" else ON_GPU) // x.shape[1])
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        gone = mixed(of_rows[rows, None] + of_columns) < draw.least
        found[rows] += x[rows].masked_fill(gone, 0.0)
    return found


def _words(x: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """Random words of rows and of columns, int64, whose sums are mixed once more."""
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    rows = rows + draw.row
    of_rows, of_columns = draw.words
    sequences = mixed((draw.first + rows // draw.length) * OF_SEQUENCE + of_rows)
    positions = (draw.start + rows % draw.length) * OF_POSITION
    return mixed(sequences + positions), mixed((columns + draw.column) * OF_COLUMN + of_columns)


@lru_cache(maxsize=1 << 14)  # asked at every pass of a product
def _words_of(seed: int, layer: int, target: str) -> tuple[int, int]:
    both = int.from_bytes(blake2b(f"{seed} {layer} {target}".encode(), digest_size=8).digest())
    return both >> 32, both & WORD


class Drops(NamedTuple):
    """What is dropped of what a layer's adapters read of a micro-batch.

    Where the layer's input is one of several equal parts of the micro-batch's tokens, `part` is its
    number.
    """

    rate: float
    seed: int
    layer: int
    first: Tensor  # as Draw's
    length: int
    start: int = 0
    part: int = 0
    by: Dropping = dropped

    def mask(self, target: str, place: int) -> Mask:
        """That of a target whose input is the part number `place` of equal parts of columns."""
        return Mask(self, _words_of(self.seed, self.layer, target), place)


class Mask(NamedTuple):
    """Which elements of one target's input are dropped."""

    drops: Drops
    words: tuple[int, int]
    place: int

    def kept(self, rows: Tensor) -> Tensor:
        """Rows [tokens, in] with zeros for what is dropped."""
        return self.drops.by(rows, self._draw(rows), None)

    def add_kept(self, total: Tensor, rows: Tensor) -> None:
        """Add the same to a total."""
        self.drops.by(rows, self._draw(rows), total)

    def _draw(self, rows: Tensor) -> Draw:
        drops, (count, width) = self.drops, rows.shape
        least = int(drops.rate * (WORD + 1))
        at = drops.part * count, self.place * width
        return Draw(drops.first, self.words, least, *at, drops.length, drops.start)


class DroppedAdapters(NamedTuple):
    """Those of products of one input, as Adapters, each of which reads it by a mask of its own."""

    each: tuple[tuple[Adapters, Mask], ...]

    def add_to(self, outputs: Sequence[Tensor], x: Tensor) -> None:
        """Add to the products' outputs [..., out] of x [..., in], in place."""
        rows = x.flatten(0, -2)
        for one, mask in self.each:
            one.add_to(outputs, mask.kept(rows))

    def by_narrow(self, by_outputs: Sequence[Tensor]) -> list[Tensor]:
        """S dy B [tokens, rank] of each, by the gradients [tokens, out] of all outputs."""
        return [one.by_narrow(by_outputs) for one, _ in self.each]

    def add_by_input(self, total: Tensor, by_narrow: Sequence[Tensor]) -> None:
        """Add to the gradient [tokens, in] by the products' input, in place."""
        for (one, mask), narrow in zip(self.each, by_narrow, strict=True):
            mask.add_kept(total, narrow @ one.down)

    def add_gradients(
        self, by_outputs: Sequence[Tensor], by_narrow: Sequence[Tensor], rows: Tensor
    ) -> None:
        """Add A's and B's gradients to their sums; `rows`: the products' input [tokens, in]."""
        for (one, mask), narrow in zip(self.each, by_narrow, strict=True):
            one.add_gradients(by_outputs, narrow, mask.kept(rows))


class Draws:
    """Of a rank's micro-batches, which sequences are theirs in the step under way.

    Their numbers are in the device's memory, at one place, where CUDA graphs find them.
    """

    def __init__(
        self, rate: float, seed: int, firsts: Tensor, tokens: tuple[int, int], by: Dropping
    ) -> None:
        """`firsts`: int64 [micro-batches], to be filled; `tokens`: Drops' length and start."""
        self._rate, self._seed, self._firsts, self._by = rate, seed, firsts, by
        self._length, self._start = tokens

    def fill(self, firsts: Sequence[int]) -> None:
        """Those of the next step; nothing runs on the device."""
        self._firsts.copy_(torch.tensor(firsts))

    def of(self, layer: int, micro_batch: int) -> Drops:
        """What is dropped in a layer's passes of a micro-batch."""
        first = self._firsts[micro_batch : micro_batch + 1]
        tokens = self._length, self._start
        return Drops(self._rate, self._seed, layer, first, *tokens, by=self._by)
