"""Rows of a layer's tensors: where each tensor, piece and chunk lies in the layer's flat buffers.

Parameters and gradients of a layer are flat buffers of its tensors in order. The optimizer state
of a piece is one flat buffer per moment, of the piece's rows in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bigplan.graph.graph import LayerKind
from bigplan.placement import LayerPlacement, Tier, split_rows

CPU_TIERS = (Tier.HOST, Tier.NVME)


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
    """A layer's tensors with their offsets, and its boxes by tier of the optimizer state."""

    offsets: Mapping[str, tuple[int, int, int]]  # name -> first element, rows, columns
    pieces: Mapping[Tier, tuple[Box, ...]]
    chunks: tuple[tuple[Box, ...], ...]  # the NVMe piece, chunk by chunk

    @classmethod
    def of(cls, kind: LayerKind, placement: LayerPlacement, chunks: int) -> LayerRows:
        """Lay out one layer."""
        offsets, start = {}, 0
        for tensor in kind.tensors:
            offsets[tensor.name] = (start, tensor.rows, tensor.columns)
            start += tensor.elements
        pieces = {tier: tuple(_boxes(kind, placement, tier)) for tier in Tier}
        columns = {tensor.name: tensor.columns for tensor in kind.tensors}
        return cls(offsets, pieces, _chunked(pieces[Tier.NVME], columns, chunks))

    @property
    def cpu_boxes(self) -> tuple[Box, ...]:
        """Rows that the CPU updates."""
        return tuple(box for tier in CPU_TIERS for box in self.pieces[tier])


def _boxes(kind: LayerKind, placement: LayerPlacement, tier: Tier) -> Iterator[Box]:
    start = place = 0
    for tensor in kind.tensors:
        rows = split_rows(tensor.rows, placement.optimizer)[tier]
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
