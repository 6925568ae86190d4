"""Rows of a layer: every element in exactly one piece, in exactly one chunk of its share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigplan.content import Content, Holds
from bigplan.graph.graph import LayerKind, Recompute, Tensor
from bigplan.placement import IN_CHUNKS, LayerPlacement, Share, Tier, piece_elements
from bigplan.runtime.pieces import Box, LayerRows


def _kind(tensors: tuple[Tensor, ...]) -> LayerKind:
    return LayerKind("k", tensors, (), (), 0, 0, {}, 0, 0)


Layout = tuple[LayerKind, LayerPlacement, dict[Share, int]]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Tensors of any shape, any fractions, some chunks."""
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
    return kind, placement, {share: draw(st.integers(1, 12)) for share in IN_CHUNKS}


def _elements(boxes: tuple[Box, ...]) -> list[int]:
    return [i for box in boxes for i in range(box.start, box.start + box.count)]


def _packed(boxes: tuple[Box, ...]) -> bool:
    """Whether the boxes lie one behind the other in their piece."""
    places = [place for box in boxes for place in range(box.place, box.place + box.count)]
    return places == list(range(len(places)))


@given(layouts())
def test_pieces_partition_the_layer(layout: Layout) -> None:
    kind, placement, chunks = layout
    rows = LayerRows.of(kind, placement, chunks)
    every = [i for _, _, boxes in rows.state for i in _elements(boxes)]
    assert sorted(every) == list(range(kind.parameters))
    updated = {share: sum(chunks, ()) for share, chunks in rows.chunks.items()}
    for share in Share:
        assert sum(b.count for b in updated[share]) == piece_elements(kind, placement, share)
    on_cpu = sorted(_elements(updated[Share.HOST]) + _elements(updated[Share.NVME]))
    assert sorted(_elements(rows.cpu_boxes)) == on_cpu


@given(layouts())
def test_boxes_are_whole_rows_of_their_tensor(
    layout: Layout,
) -> None:
    kind, placement, chunks = layout
    rows = LayerRows.of(kind, placement, chunks)
    start = 0
    for tensor in kind.tensors:
        assert rows.offsets[tensor.name] == (start, tensor.rows, tensor.columns)
        start += tensor.elements
    for _, _, boxes in rows.state:
        for box in boxes:
            first, height, columns = rows.offsets[box.tensor]
            assert box.count > 0
            assert box.count % columns == 0
            assert (box.start - first) % columns == 0
            assert first <= box.start
            assert box.start + box.count <= first + height * columns


@given(layouts())
def test_chunks_are_about_equal_and_packed(layout: Layout) -> None:
    kind, placement, chunks = layout
    rows = LayerRows.of(kind, placement, chunks)
    widest = max(tensor.columns for tensor in kind.tensors)
    for share in Share:
        assert len(rows.chunks[share]) == chunks.get(share, 1)
        even = -(-piece_elements(kind, placement, share) // chunks.get(share, 1))
        for number, boxes in enumerate(rows.chunks[share]):
            assert rows.boxes(Content(Holds.STATE, 7, share, number)) == boxes
            assert _packed(boxes)
            # A boundary moves up to the next whole row: by less than a row of the widest tensor.
            assert sum(box.count for box in boxes) < even + widest


def test_slices_say_where_a_box_lies() -> None:
    box = Box("w", start=12, count=8, place=4)
    assert (box.in_layer, box.in_piece) == (slice(12, 20), slice(4, 12))


def test_no_chunks_of_what_the_cpu_updates_in_place() -> None:
    everywhere = {Share.HOST: 1.0}
    placement = LayerPlacement(Tier.HOST, Tier.HOST, Recompute.NONE, Tier.GPU, everywhere)
    rows = LayerRows.of(_kind((Tensor("w", 3, 2),)), placement, dict.fromkeys(IN_CHUNKS, 0))
    assert [(share, chunk) for share, chunk, boxes in rows.state if boxes] == [(Share.HOST, 0)]
    assert sum(box.count for box in rows.cpu_boxes) == 6
