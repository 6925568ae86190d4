"""Rows of a layer: every element in exactly one piece, every NVMe row in exactly one chunk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigplan.graph.graph import LayerKind, Recompute, Tensor
from bigplan.placement import LayerPlacement, Tier, piece_elements
from bigplan.runtime.pieces import Box, LayerRows


def _kind(tensors: tuple[Tensor, ...]) -> LayerKind:
    return LayerKind("k", tensors, (), (), 0, 0, 0, (), 0, 0)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[LayerKind, LayerPlacement, int]:
    """Tensors of any shape, any fractions, some chunks."""
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=5)
    )
    kind = _kind(tuple(Tensor(f"t{i}", r, c) for i, (r, c) in enumerate(shapes)))
    gpu = draw(st.sampled_from((0.0, 1.0)) | st.floats(0, 1))
    host = (1 - gpu) * draw(st.sampled_from((0.0, 1.0)) | st.floats(0, 1))
    fractions = {Tier.GPU: gpu, Tier.HOST: host, Tier.NVME: max(0.0, 1 - gpu - host)}
    placement = LayerPlacement(Tier.GPU, Tier.GPU, Recompute.NONE, Tier.GPU, fractions)
    return kind, placement, draw(st.integers(1, 12))


def _elements(boxes: tuple[Box, ...]) -> list[int]:
    return [i for box in boxes for i in range(box.start, box.start + box.count)]


def _packed(boxes: tuple[Box, ...]) -> bool:
    """Whether the boxes lie one behind the other in their piece."""
    places = [place for box in boxes for place in range(box.place, box.place + box.count)]
    return places == list(range(len(places)))


@given(layouts())
def test_pieces_partition_the_layer(layout: tuple[LayerKind, LayerPlacement, int]) -> None:
    kind, placement, chunks = layout
    rows = LayerRows.of(kind, placement, chunks)
    every = [i for tier in Tier for i in _elements(rows.pieces[tier])]
    assert sorted(every) == list(range(kind.parameters))
    for tier in Tier:
        boxes = rows.pieces[tier]
        assert _packed(boxes)
        assert sum(box.count for box in boxes) == piece_elements(kind, placement, tier)
    on_cpu = sorted(_elements(rows.pieces[Tier.HOST]) + _elements(rows.pieces[Tier.NVME]))
    assert sorted(_elements(rows.cpu_boxes)) == on_cpu


@given(layouts())
def test_boxes_are_whole_rows_of_their_tensor(
    layout: tuple[LayerKind, LayerPlacement, int],
) -> None:
    kind, placement, chunks = layout
    rows = LayerRows.of(kind, placement, chunks)
    start = 0
    for tensor in kind.tensors:
        assert rows.offsets[tensor.name] == (start, tensor.rows, tensor.columns)
        start += tensor.elements
    for boxes in (*rows.pieces.values(), *rows.chunks):
        for box in boxes:
            first, height, columns = rows.offsets[box.tensor]
            assert box.count > 0
            assert box.count % columns == 0
            assert (box.start - first) % columns == 0
            assert first <= box.start
            assert box.start + box.count <= first + height * columns


@given(layouts())
def test_chunks_partition_the_nvme_piece(layout: tuple[LayerKind, LayerPlacement, int]) -> None:
    kind, placement, chunks = layout
    rows = LayerRows.of(kind, placement, chunks)
    assert len(rows.chunks) == chunks
    assert sorted(i for boxes in rows.chunks for i in _elements(boxes)) == sorted(
        _elements(rows.pieces[Tier.NVME])
    )
    total = piece_elements(kind, placement, Tier.NVME)
    widest = max(tensor.columns for tensor in kind.tensors)
    for boxes in rows.chunks:
        assert _packed(boxes)
        # A boundary moves up to the next whole row, so by less than a row of the widest tensor.
        assert sum(box.count for box in boxes) < -(-total // chunks) + widest
    assert sum(box.count for boxes in rows.chunks for box in boxes) == total


def test_slices_say_where_a_box_lies() -> None:
    box = Box("w", start=12, count=8, place=4)
    assert (box.in_layer, box.in_piece) == (slice(12, 20), slice(4, 12))


def test_no_chunks_without_an_nvme_piece() -> None:
    everywhere = {Tier.GPU: 0.0, Tier.HOST: 1.0, Tier.NVME: 0.0}
    placement = LayerPlacement(Tier.HOST, Tier.HOST, Recompute.NONE, Tier.GPU, everywhere)
    rows = LayerRows.of(_kind((Tensor("w", 3, 2),)), placement, 0)
    assert rows.chunks == ()
    assert sum(box.count for box in rows.pieces[Tier.HOST]) == 6
