"""Elements of a layer: each in one rank's part, one piece of it, one chunk of its share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigplan.content import Content, Holds
from bigplan.graph.graph import LayerKind, Recompute, Tensor
from bigplan.placement import IN_CHUNKS, LayerPlacement, Share, Tier, pieces
from bigplan.runtime.pieces import Box, LayerRows


def _kind(tensors: tuple[Tensor, ...]) -> LayerKind:
    return LayerKind("k", tensors, (), (), 0, 0, {}, 0, 0)


Layout = tuple[LayerKind, list[LayerRows], dict[Share, range]]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Tensors of any shape, any fractions, some chunks, some ranks."""
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=5)
    )
    kind = _kind(tuple(Tensor(f"t{i}", r, c) for i, (r, c) in enumerate(shapes)))
    gpu = draw(st.sampled_from((0.0, 1.0)) | st.floats(0, 1))
    streamed = (1 - gpu) * draw(st.sampled_from((0.0, 1.0)) | st.floats(0, 1))
    host = (1 - gpu - streamed) * draw(st.sampled_from((0.0, 1.0)) | st.floats(0, 1))
    parts = (gpu, streamed, host, max(0.0, 1 - gpu - streamed - host))
    fractions = dict(zip(Share, parts, strict=True))
    placement = LayerPlacement(Tier.GPU, Tier.GPU, Recompute.NONE, Tier.GPU, fractions)
    counts = {share: draw(st.integers(1, 12)) for share in IN_CHUNKS}
    ranks = draw(st.integers(1, 4))
    every = [LayerRows.of(kind, placement, counts, ranks, rank) for rank in range(ranks)]
    return kind, every, pieces(kind, placement, ranks)


def _elements(boxes: tuple[Box, ...]) -> list[int]:
    return [i for box in boxes for i in range(box.start, box.start + box.count)]


def _packed(boxes: tuple[Box, ...]) -> bool:
    """Whether the boxes lie one behind the other in their piece."""
    places = [place for box in boxes for place in range(box.place, box.place + box.count)]
    return places == list(range(len(places)))


@given(layouts())
def test_ranks_and_pieces_partition_the_layer(layout: Layout) -> None:
    kind, every, cut = layout
    found = [i for rows in every for _, _, boxes in rows.state for i in _elements(boxes)]
    assert sorted(found) == list(range(kind.parameters))
    for rank, rows in enumerate(every):
        assert rows.part.elements == kind.owned(len(every))
        assert rows.part.first == rank * rows.part.elements
        assert sum(len(_elements(boxes)) for _, _, boxes in rows.state) == rows.part.real
        for share, chunks in rows.chunks.items():
            for box in sum(chunks, ()):
                assert box.owned == box.start - rows.part.first
                assert set(range(rows.part.elements)[box.in_part]) <= set(cut[share])


@given(layouts())
def test_boxes_are_of_their_tensor(layout: Layout) -> None:
    kind, every, _ = layout
    for rows in every:
        start = 0
        for tensor in kind.tensors:
            assert rows.offsets[tensor.name] == (start, tensor.rows, tensor.columns)
            start += tensor.elements
        for _, _, boxes in rows.state:
            for box in boxes:
                first, height, columns = rows.offsets[box.tensor]
                assert box.count > 0
                assert first <= box.start
                assert box.start + box.count <= first + height * columns


@given(layouts())
def test_chunks_are_about_equal_and_packed(layout: Layout) -> None:
    kind, every, cut = layout
    for rows in every:
        for share, chunks in rows.chunks.items():
            even = -(-len(cut[share]) // len(chunks))
            for number, boxes in enumerate(chunks):
                assert rows.boxes(Content(Holds.STATE, 7, share, number)) == boxes
                assert _packed(boxes)
                # A bound moves up to the next whole unit.
                assert sum(box.count for box in boxes) < even + kind.unit


@given(layouts())
def test_what_the_cpu_updates_moves_as_one(layout: Layout) -> None:
    _, every, cut = layout
    on_cpu = [i for share in (Share.HOST, Share.NVME) for i in cut[share]]
    for rows in every:
        part = range(rows.part.elements)
        assert list(part[rows.moved(None)]) == list(part)
        if on_cpu:
            assert list(part[rows.moved(Share.HOST)]) == on_cpu
        if cut[Share.STREAMED]:
            assert part[rows.moved(Share.STREAMED)] == cut[Share.STREAMED]


def test_slices_say_where_a_box_lies() -> None:
    box = Box("w", start=12, count=8, place=4, owned=2)
    assert (box.in_layer, box.in_part, box.in_piece) == (slice(12, 20), slice(2, 10), slice(4, 12))


def test_no_chunks_of_what_the_cpu_updates_in_place() -> None:
    everywhere = {Share.HOST: 1.0}
    placement = LayerPlacement(Tier.HOST, Tier.HOST, Recompute.NONE, Tier.GPU, everywhere)
    rows = LayerRows.of(_kind((Tensor("w", 3, 2),)), placement, dict.fromkeys(IN_CHUNKS, 0))
    assert [(share, chunk) for share, chunk, boxes in rows.state if boxes] == [(Share.HOST, 0)]
