"""What a rank owns of a layer: where its tensors, pieces and chunks lie in flat buffers.

Parameters and gradients of a layer are flat buffers of its tensors in order, filled up so that the
ranks that share it own equal parts, one behind the other. A rank's part is cut in order into the
shares of its placement. The optimizer state of a piece is one flat buffer per moment, of the
piece's elements in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bigplan.content import Content
from bigplan.graph.graph import LayerKind
from bigplan.placement import IN_CHUNKS, ON_CPU, LayerPlacement, Share, pieces


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank owns of a layer: `elements` from element `first` on, `real` of them tensors'."""

    first: int
    elements: int
    real: int

    @property
    def tensors(self) -> range:
        """Elements of the layer's tensors that it has."""
        return range(self.first, self.first + self.real)

    @classmethod
    def of(cls, kind: LayerKind, ranks: int, rank: int) -> Part:
        """The part of rank number `rank` of those that share the layer."""
        elements = kind.owned(ranks)
        first = rank * elements
        return cls(first, elements, min(elements, max(0, kind.parameters - first)))


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of one tensor: `count` at `start` in the layer, at `place` in their piece.

    `owned`: where they begin in the rank's part of the layer.
    """

    tensor: str
    start: int
    count: int
    place: int
    owned: int

    @property
    def in_layer(self) -> slice:
        """Elements within the layer's flat buffer."""
        return slice(self.start, self.start + self.count)

    @property
    def in_part(self) -> slice:
        """Elements within the rank's part of it."""
        return slice(self.owned, self.owned + self.count)

    @property
    def in_piece(self) -> slice:
        """Elements within the piece's flat buffer."""
        return slice(self.place, self.place + self.count)


@dataclass(frozen=True, slots=True)
class LayerRows:
    """A layer's tensors with their offsets, and what a rank owns, by share and chunk.

    A share that is not updated in chunks is one chunk.
    """

    offsets: Mapping[str, tuple[int, int, int]]  # name -> first element, rows, columns
    part: Part
    pieces: Mapping[Share, range]  # of the part
    chunks: Mapping[Share, tuple[tuple[Box, ...], ...]]

    @classmethod
    def of(
        cls,
        kind: LayerKind,
        placement: LayerPlacement,
        counts: Mapping[Share, int],
        ranks: int = 1,
        rank: int = 0,
    ) -> LayerRows:
        """Lay out one layer; `counts`: chunks of the shares that have some."""
        offsets, start = {}, 0
        for tensor in kind.tensors:
            offsets[tensor.name] = (start, tensor.rows, tensor.columns)
            start += tensor.elements
        part, cut = Part.of(kind, ranks, rank), pieces(kind, placement, ranks)
        chunks = {}
        for share, piece in cut.items():
            number = counts[share] if share in IN_CHUNKS else 1
            bounds = _bounds(piece, number, kind.unit)
            chunks[share] = tuple(tuple(_boxes(kind, part, elements)) for elements in bounds)
        return cls(offsets, part, cut, chunks)

    def boxes(self, state: Content) -> tuple[Box, ...]:
        """Elements of some of the layer's optimizer state."""
        assert state.share is not None, state
        return self.chunks[state.share][state.chunk]

    @property
    def state(self) -> Iterator[tuple[Share, int, tuple[Box, ...]]]:
        """Share, chunk and boxes of all state."""
        for share, chunks in self.chunks.items():
            for number, boxes in enumerate(chunks):
                yield share, number, boxes

    def boxes_of(self, elements: range) -> Iterator[Box]:
        """Elements of the layer, whoever owns them, as a piece of their own."""
        for name, (start, rows, columns) in self.offsets.items():
            low, high = max(start, elements.start), min(start + rows * columns, elements.stop)
            if low < high:
                yield Box(name, low, high - low, low - elements.start, low - self.part.first)

    def moved(self, share: Share | None) -> slice:
        """Elements of the part that a move for an updater takes along; without one, all."""
        if share is None:
            return slice(0, self.part.elements)
        together = ON_CPU if share in ON_CPU else (share,)
        ranges = [self.pieces[one] for one in together if self.pieces[one]]
        return slice(ranges[0].start, ranges[-1].stop)


def _bounds(piece: range, chunks: int, unit: int) -> Iterator[range]:
    """The piece in equal chunks, each bound moved up to a whole unit.

    A chunk has at most one unit more than an equal part.
    """
    total = len(piece)
    ends = [min(total, -(-total * i // (chunks * unit)) * unit) for i in range(1, chunks)]
    for low, high in pairwise((0, *ends, total) if chunks else ()):
        yield range(piece.start + low, piece.start + high)


def _boxes(kind: LayerKind, part: Part, elements: range) -> Iterator[Box]:
    """Elements of the rank's part, tensor by tensor."""
    first, last = part.first + elements.start, part.first + elements.stop
    start = 0
    for tensor in kind.tensors:
        low, high = max(start, first), min(start + tensor.elements, last)
        if low < high:
            yield Box(tensor.name, low, high - low, low - first, low - part.first)
        start += tensor.elements


def merged(boxes: Sequence[Box]) -> Iterator[Box]:
    """The boxes, those that follow each other in layer and piece as one."""
    last: Box | None = None
    for box in boxes:
        if last is not None and _follows(last, box):
            last = replace(last, count=last.count + box.count)
            continue
        if last is not None:
            yield last
        last = box
    if last is not None:
        yield last


def _follows(last: Box, box: Box) -> bool:
    return (last.in_layer.stop, last.in_piece.stop) == (box.start, box.place)
