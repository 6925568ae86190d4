"""Rows of a layer's tensors: where each tensor, piece and chunk lies in the layer's flat buffers.

Parameters and gradients of a layer are flat buffers of its tensors in order. The optimizer state
of a piece is one flat buffer per moment, of the piece's rows in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bigplan.content import Content
from bigplan.graph.graph import LayerKind
from bigplan.placement import IN_CHUNKS, ON_CPU, LayerPlacement, Share, split_rows


@dataclass(frozen=True, slots=True)
class Box:
    """Rows of one tensor: `count` elements at `start` in the layer, at `place` in its piece."""

    tensor: str
    start: int
    count: int
    place: int

    @property
    def in_layer(self) -> slice:
        """Elements within the layer's flat buffer."""
        return slice(self.start, self.start + self.count)

    @property
    def in_piece(self) -> slice:
        """Elements within the piece's flat buffer."""
        return slice(self.place, self.place + self.count)


@dataclass(frozen=True, slots=True)
class LayerRows:
    """A layer's tensors with their offsets, and its boxes by share and chunk.

    A share that is not updated in chunks is one chunk.
    """

    offsets: Mapping[str, tuple[int, int, int]]  # name -> first element, rows, columns
    chunks: Mapping[Share, tuple[tuple[Box, ...], ...]]

    @classmethod
    def of(
        cls, kind: LayerKind, placement: LayerPlacement, counts: Mapping[Share, int]
    ) -> LayerRows:
        """Lay out one layer; `counts`: chunks of the shares that have some."""
        offsets, start = {}, 0
        for tensor in kind.tensors:
            offsets[tensor.name] = (start, tensor.rows, tensor.columns)
            start += tensor.elements
        columns = {tensor.name: tensor.columns for tensor in kind.tensors}
        chunks = {}
        for share in Share:
            boxes = tuple(_boxes(kind, placement, share))
            cut = _chunked(boxes, columns, counts[share]) if share in IN_CHUNKS else (boxes,)
            chunks[share] = cut
        return cls(offsets, chunks)

    def boxes(self, state: Content) -> tuple[Box, ...]:
        """Rows of some of the layer's optimizer state."""
        assert state.share is not None, state
        return self.chunks[state.share][state.chunk]

    @property
    def state(self) -> Iterator[tuple[Share, int, tuple[Box, ...]]]:
        """Share, chunk and boxes of all state."""
        for share, chunks in self.chunks.items():
            for number, boxes in enumerate(chunks):
                yield share, number, boxes

    @property
    def cpu_boxes(self) -> tuple[Box, ...]:
        """Rows that the CPU updates."""
        return tuple(box for share in ON_CPU for boxes in self.chunks[share] for box in boxes)


def _boxes(kind: LayerKind, placement: LayerPlacement, share: Share) -> Iterator[Box]:
    start = place = 0
    for tensor in kind.tensors:
        rows = split_rows(tensor.rows, placement.rows)[share]
        count = len(rows) * tensor.columns
        if count:
            yield Box(tensor.name, start + rows.start * tensor.columns, count, place)
            place += count
        start += tensor.elements


def _chunked(
    boxes: tuple[Box, ...], columns: Mapping[str, int], chunks: int
) -> tuple[tuple[Box, ...], ...]:
    """Equal shares of the piece, each boundary moved up to the next whole row.

    Places are counted from the start of each chunk. A chunk has at most one row of the widest
    tensor more than an equal share.
    """
    total = sum(box.count for box in boxes)
    parts: list[tuple[Box, ...]] = []
    for chunk in range(chunks):
        low, high = (-(-total * i // chunks) for i in (chunk, chunk + 1))
        part, place = [], 0
        for box in boxes:
            first, last = (_to_row(box, columns[box.tensor], bound) for bound in (low, high))
            if last > first:
                part.append(Box(box.tensor, box.start + first, last - first, place))
                place += last - first
        parts.append(tuple(part))
    return tuple(parts)


def _to_row(box: Box, columns: int, bound: int) -> int:
    """Elements of the box before `bound` in its piece, up to a whole row."""
    inside = min(max(bound - box.place, 0), box.count)
    return min(-(-inside // columns) * columns, box.count)


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
