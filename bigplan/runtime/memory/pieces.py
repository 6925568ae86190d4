"""What a rank owns of a layer: where its tensors, pieces and chunks lie in flat buffers.

Parameters and gradients of a layer are flat buffers of its tensors in order, each as one
tensor-parallel rank has it. A buffer is filled up, so that the data-parallel ranks that share it
own equal parts, one behind the other. A rank's part is cut in order into the shares of its
placement. The optimizer state of a piece is one flat buffer per moment, of the piece's elements in
the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

from bigplan.content import Content
from bigplan.graph.graph import LayerKind, Tensor
from bigplan.graph.strategy import Strategy
from bigplan.layer_placement import LayerPlacement, pieces
from bigplan.placement import IN_CHUNKS, ON_CPU, Share
from bigplan.ranks import Coordinates
from bigplan.rectangle import Rectangle, cut, held
from bigplan.spec.step import Parameter


class Owner(NamedTuple):
    """Number `rank` of so many ranks that share a layer out, and `tensor` of `tp` that split it.

    `expert` of `ep` ranks has that part of the experts. `copy` numbers ranks with the same experts
    where nobody shares them out.
    """

    rank: int = 0
    ranks: int = 1
    tensor: int = 0
    tp: int = 1
    expert: int = 0
    ep: int = 1
    copy: int = 0

    @classmethod
    def of(cls, at: Coordinates, strategy: Strategy) -> Self:
        """The rank at these coordinates; without ZeRO each data-parallel one has all.

        Of zero groups, each shares out a copy of its own.
        """
        ranks = strategy.zero_ranks
        rank = at.data % ranks
        copy, expert = divmod(at.data, strategy.ep)
        alike = copy if strategy.ep > 1 and not strategy.zero else 0
        return cls(rank, ranks, at.tensor, strategy.tp, expert, strategy.ep, alike)

    def holds(self, parameter: Parameter) -> Rectangle | None:
        """What such ranks together have of a parameter; None: only padding."""
        return held(parameter, self.tp, self.tensor, self.ep, self.expert)


ALONE = Owner()


class OwnedRange(NamedTuple):
    """`elements` from element `first` of a layer on, `real` of them tensors'.

    The rank counts and stores the first `counted` of these. Elements that neighbours have, too, are
    counted and stored by the first of them.
    """

    first: int
    elements: int
    real: int
    counted: int

    @property
    def tensors(self) -> range:
        """Elements of the layer's tensors."""
        return range(self.first, self.first + self.real)

    @property
    def stored(self) -> range:
        """The tensors' elements that this rank stores."""
        return range(self.first, self.first + self.counted)


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """What a rank owns of a layer: ranges of it, one behind the other.

    There is one, or two where experts are spread over ranks: the rank's of the experts that it has,
    which fewer ranks share, then its own of the rest.
    """

    ranges: tuple[OwnedRange, ...]

    @property
    def elements(self) -> int:
        """Elements, filling included."""
        return sum(own.elements for own in self.ranges)

    def within(self, part: slice) -> Iterator[tuple[int, range]]:
        """Some of the part's elements as ranges of the layer, each with its place in the part.

        A head whose table is the embedding's and whose norm has no weights has a range of none.
        """
        start = 0
        for own in self.ranges:
            low, high = max(part.start, start), min(part.stop, start + own.elements)
            if low < high or not own.elements:
                yield low, range(own.first + low - start, own.first + high - start)
            start += own.elements

    def stores(self, element: int) -> bool:
        """Whether the rank stores that element of the layer."""
        return any(element in own.stored for own in self.ranges)

    @classmethod
    def of(cls, kind: LayerKind, owner: Owner) -> OwnedPart:
        """The part of one of the ranks that have the layer."""
        if kind.ep > 1:
            return cls(tuple(_spread(kind, owner)))
        elements = kind.owned(owner.ranks)
        first, alone = owner.rank * elements, _counted(kind.tensors, owner)
        real, counted = (min(elements, max(0, end - first)) for end in (kind.parameters, alone))
        return cls((OwnedRange(first, elements, real, counted),))


def _counted(tensors: Iterable[Tensor], owner: Owner) -> int:
    """Elements of these that no tensor-parallel rank before this one has: its first ones.

    Tensors that more ranks share lie behind those that fewer share (shape.local_tensors).
    """
    return sum(t.elements for t in tensors if owner.tensor % t.holders == 0)


def _spread(kind: LayerKind, owner: Owner) -> Iterator[OwnedRange]:
    """What a rank owns of a layer whose experts, its first elements, are spread over ranks.

    Where nobody shares them out, the first rank that has some elements counts and stores them.
    """
    experts, rest = kind.whole_experts, kind.parameters - kind.whole_experts
    each = kind.owned_experts(owner.ranks)
    first = owner.rank // kind.ep * each
    counted = min(each, max(0, _counted((t for t in kind.tensors if t.experts), owner) - first))
    yield OwnedRange(first, each, each, 0 if owner.copy else counted)
    each = kind.owned(owner.ranks) - each
    first = owner.rank * each
    alone = _counted((t for t in kind.tensors if not t.experts), owner)
    real, counted = (min(each, max(0, end - first)) for end in (rest, alone))
    again = owner.ranks == 1 and (owner.copy or owner.expert)
    yield OwnedRange(experts + first, each, real, 0 if again else counted)


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of one tensor: `count` at `start` in the layer, at `place` in their piece.

    `owned`: where they begin in the rank's part of the layer, if they are of it.
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


Offsets = Mapping[str, tuple[int, int, int]]  # by tensor: its first element, rows, columns


def offsets_of(kind: LayerKind) -> Offsets:
    """Where the tensors of a layer lie in its flat buffer."""
    ends = accumulate(tensor.elements for tensor in kind.tensors)
    return {
        tensor.name: (end - tensor.elements, tensor.rows, tensor.columns)
        for tensor, end in zip(kind.tensors, ends, strict=True)
    }


@dataclass(frozen=True, slots=True)
class LayerRows:
    """A layer's tensors with their offsets, and what a rank owns, by share and chunk.

    A share that is not updated in chunks is one chunk. `held`: what the tensors are of the model's
    parameters. Rows of a tensor beyond that are filling, and stay zero.
    """

    offsets: Offsets
    held: Mapping[str, Rectangle | None]
    part: OwnedPart
    pieces: Mapping[Share, range]  # of the part
    chunks: Mapping[Share, tuple[tuple[Box, ...], ...]]

    @classmethod
    def of(
        cls,
        kind: LayerKind,
        parameters: Iterable[Parameter],
        placement: LayerPlacement,
        counts: Mapping[Share, int],
        owner: Owner = ALONE,
    ) -> LayerRows:
        """Lay out one layer of these parameters; `counts`: chunks of the shares that have some."""
        mine = {one.name: owner.holds(one) for one in parameters}
        part, shares = OwnedPart.of(kind, owner), pieces(kind, placement, owner.ranks)
        chunks = {}
        for share, piece in shares.items():
            number = counts[share] if share in IN_CHUNKS else 1
            bounds = _bounds(piece, number, kind.unit)
            chunks[share] = tuple(tuple(_boxes(kind, part, elements)) for elements in bounds)
        return cls(offsets_of(kind), mine, part, shares, chunks)

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
        """Elements of the layer, on any rank, as a separate piece."""
        for name, (start, rows, columns) in self.offsets.items():
            low, high = max(start, elements.start), min(start + rows * columns, elements.stop)
            if low < high:
                place = low - elements.start
                yield Box(name, low, high - low, place, place)

    def rectangles(self, elements: range) -> Iterator[tuple[int, Rectangle]]:
        """The rectangles of the model's parameters that these elements hold, in their order.

        Each rectangle comes with its first element, and lies row by row from there. Elements
        between rectangles are filling.
        """
        for name, (before, rows, columns) in self.offsets.items():
            mine, start = self.held[name], max(elements.start - before, 0)
            stop = min(elements.stop - before, rows * columns)
            if mine is None or start >= stop:
                continue
            for local in cut(name, columns, start, stop):
                real = local.moved(mine.first_row, mine.first_column).shared(mine)
                if real is not None:
                    yield self.element(real), real

    def filling(self, elements: range) -> Iterator[range]:
        """Elements of the layer among these that only fill up."""
        start = elements.start
        for first, part in self.rectangles(elements):
            if start < first:
                yield range(start, first)
            start = first + part.elements
        if start < elements.stop:
            yield range(start, elements.stop)

    def element(self, part: Rectangle) -> int:
        """The layer's element that the first one of a part of a parameter is."""
        before, _, columns = self.offsets[part.parameter]
        mine = self.held[part.parameter]
        assert mine is not None, part
        row, column = part.first_row - mine.first_row, part.first_column - mine.first_column
        return before + row * columns + column

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


def _boxes(kind: LayerKind, part: OwnedPart, elements: range) -> Iterator[Box]:
    """Elements of the rank's part, tensor by tensor."""
    for owned, own in part.within(slice(elements.start, elements.stop)):
        start = 0
        for tensor in kind.tensors:
            low, high = max(start, own.start), min(start + tensor.elements, own.stop)
            if low < high:
                place = owned + low - own.start
                yield Box(tensor.name, low, high - low, place - elements.start, place)
            start += tensor.elements


def packed(boxes: Iterable[Box]) -> Iterator[Box]:
    """The boxes one behind the other, as if they were a piece."""
    place = 0
    for box in boxes:
        yield replace(box, place=place)
        place += box.count


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
