"""Elements of a layer: each in one rank's part, one piece of it, one chunk of its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.content import Content, Holds
from bigplan.graph.graph import LayerKind, Recompute, Tensor
from bigplan.graph.shape import local_tensor
from bigplan.graph.strategy import Strategy
from bigplan.layer_placement import LayerPlacement, pieces
from bigplan.placement import IN_CHUNKS, Share, Tier
from bigplan.ranks import Coordinates
from bigplan.rectangle import Rectangle, all_of, held
from bigplan.runtime.memory.pieces import Box, LayerRows, Owner
from bigplan.spec.step import Parameter, Split


def _kind(parameters: Sequence[Parameter], tp: int = 1) -> LayerKind:
    tensors = sorted((local_tensor(p, tp) for p in parameters), key=lambda t: t.holders)
    return LayerKind("k", tuple(tensors), (), (), 0, 0, {}, 0, 0)


Layout = tuple[LayerKind, list[LayerRows], dict[Share, range]]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Tensors of any shape, any fractions, some chunks, some ranks."""
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=5)
    )
    parameters = [Parameter(f"t{i}", shape, "rows", False) for i, shape in enumerate(shapes)]
    kind = _kind(parameters)
    gpu = draw(st.sampled_from((0.0, 1.0)) | st.floats(0, 1))
    streamed = (1 - gpu) * draw(st.sampled_from((0.0, 1.0)) | st.floats(0, 1))
    host = (1 - gpu - streamed) * draw(st.sampled_from((0.0, 1.0)) | st.floats(0, 1))
    parts = (gpu, streamed, host, max(0.0, 1 - gpu - streamed - host))
    fractions = dict(zip(Share, parts, strict=True))
    placement = LayerPlacement(Tier.GPU, Tier.GPU, Recompute.NONE, Tier.GPU, fractions)
    counts = {share: draw(st.integers(1, 12)) for share in IN_CHUNKS}
    ranks = draw(st.integers(1, 4))
    owners = (Owner(rank, ranks) for rank in range(ranks))
    every = [LayerRows.of(kind, parameters, placement, counts, owner) for owner in owners]
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
        (own,) = rows.part.ranges
        assert own.first == rank * rows.part.elements
        assert sum(len(_elements(boxes)) for _, _, boxes in rows.state) == own.real
        for share, chunks in rows.chunks.items():
            for box in sum(chunks, ()):
                assert box.owned == box.start - own.first
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
    counts, alone = dict.fromkeys(IN_CHUNKS, 0), [Parameter("w", (3, 2), "rows", False)]
    rows = LayerRows.of(_kind(alone), alone, placement, counts)
    assert [(share, chunk) for share, chunk, boxes in rows.state if boxes] == [(Share.HOST, 0)]


TP = (1, 2, 3, 4, 8)


@st.composite
def split_layers(draw: st.DrawFn) -> tuple[list[Parameter], int, int]:
    """Parameters as a model has them: words that fill up, few key-value heads; tp and ranks."""
    tp = draw(st.sampled_from(TP))
    width, wide = draw(st.integers(1, 6)), tp * draw(st.integers(1, 3))
    heads = draw(st.sampled_from([n for n in range(1, 9) if n % tp == 0 or tp % n == 0]))
    rows = heads * draw(st.integers(1, 3))
    words, each = draw(st.integers(1, 20)), draw(st.integers(1, 4))
    shapes: list[tuple[str, tuple[int, ...], Split, int]] = [
        ("words", (words, width), "rows", 0),
        ("by words", (words,), "rows", 0),
        ("queries", (tp * each, width), "rows", 0),
        ("keys", (rows, width), "rows", heads),
        ("by keys", (rows,), "rows", heads),
        ("closing", (width, wide), "columns", 0),
        ("by closing", (width,), "replicated", 0),
        ("places", (draw(st.integers(1, 5)), width), "replicated", 0),
    ]
    chosen = draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=5, unique=True))
    parameters = [Parameter(name, shape, split, False, n) for name, shape, split, n in chosen]
    return parameters, tp, draw(st.integers(1, 4))


def _rows(parameters: list[Parameter], owner: Owner) -> LayerRows:
    fractions = {Share.GPU: 0.4, Share.HOST: 0.6}
    placement = LayerPlacement(Tier.GPU, Tier.GPU, Recompute.NONE, Tier.GPU, fractions)
    return LayerRows.of(
        _kind(parameters, owner.tp), parameters, placement, dict.fromkeys(IN_CHUNKS, 0), owner
    )


Cell = tuple[str, int, int]


def _cells(rows: LayerRows, elements: range) -> Iterator[tuple[int, Cell]]:
    """Every element that is somebody's, with its place in the model."""
    for first, part in rows.rectangles(elements):
        assert first == rows.element(part)
        for number in range(part.elements):
            row, column = divmod(number, part.columns)
            yield first + number, (part.parameter, part.first_row + row, part.first_column + column)


@given(split_layers())
def test_ranks_hold_every_element_of_the_model_as_often_as_it_is_repeated(
    layer: tuple[list[Parameter], int, int],
) -> None:
    parameters, tp, ranks = layer
    found: Counter[Cell] = Counter()
    counted: Counter[Cell] = Counter()
    for tensor in range(tp):
        for rank in range(ranks):
            rows = _rows(parameters, Owner(rank, ranks, tensor, tp))
            (own,) = rows.part.ranges
            cells = list(_cells(rows, own.tensors))
            found.update(cell for _, cell in cells)
            counted.update(cell for element, cell in cells if rows.part.stores(element))
            assert [i for i, _ in cells] == sorted({i for i, _ in cells})
            filling = [i for part in rows.filling(own.tensors) for i in part]
            assert sorted([*filling, *(i for i, _ in cells)]) == list(own.tensors)
    every = {
        (p.name, row, column): p.holders(tp)
        for p in parameters
        for row in range(all_of(p).rows)
        for column in range(all_of(p).columns)
    }
    assert found == every
    assert counted == dict.fromkeys(every, 1)


@given(split_layers(), st.data())
def test_any_elements_are_the_rectangles_of_the_whole_layer_among_them(
    layer: tuple[list[Parameter], int, int], data: st.DataObject
) -> None:
    parameters, tp, _ = layer
    rows = _rows(parameters, Owner(tensor=data.draw(st.integers(0, tp - 1)), tp=tp))
    (own,) = rows.part.ranges
    everything = range(own.real)
    start = data.draw(st.integers(0, own.real))
    part = range(start, data.draw(st.integers(start, own.real)))
    among = [(i, cell) for i, cell in _cells(rows, everything) if i in part]
    assert list(_cells(rows, part)) == among


def test_words_fill_up_and_few_heads_are_repeated() -> None:
    words = Parameter("words", (5, 2), "rows", True)
    assert [held(words, 4, rank) for rank in range(4)] == [
        Rectangle("words", 0, 2, 0, 2),
        Rectangle("words", 2, 4, 0, 2),
        Rectangle("words", 4, 5, 0, 2),
        None,
    ]
    keys = Parameter("keys", (6, 2), "rows", True, heads=2)
    assert keys.local(4) == (3, 2)
    assert [held(keys, 4, rank) for rank in range(4)] == [
        *[Rectangle("keys", 0, 3, 0, 2)] * 2,
        *[Rectangle("keys", 3, 6, 0, 2)] * 2,
    ]


EXPERTS = Parameter("experts.up_proj.weight", (16 * 8, 24), "rows", True, experts=8)
REST = (
    Parameter("router.weight", (8, 24), "replicated", True),
    Parameter("n", (24,), "rows", False),
)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(("dp", "ep"), [(2, 2), (4, 2), (8, 4), (8, 8)])
def test_spread_experts_are_stored_once_and_lie_as_in_the_model(
    dp: int, ep: int, zero: int
) -> None:
    parameters = (EXPERTS, *REST)
    local = Tensor(EXPERTS.name, *EXPERTS.local(1, ep), experts=8 // ep)
    kind = replace(
        _kind(REST),
        tensors=(local, *(Tensor(p.name, *p.matrix) for p in REST)),
        whole_experts=local.elements,
        ep=ep,
    )
    strategy, counted = Strategy(dp=dp, ep=ep, zero=zero), Counter[Cell]()
    fractions = dict(zip(Share, (0.3, 0.2, 0.3, 0.2), strict=True))
    placement = LayerPlacement(Tier.GPU, Tier.GPU, Recompute.NONE, Tier.GPU, fractions)
    counts = dict.fromkeys(IN_CHUNKS, 3)
    for data in range(dp):
        owner = Owner.of(Coordinates(0, data, 0), strategy)
        rows = LayerRows.of(kind, parameters, placement, counts, owner)
        assert rows.part.elements == kind.owned(dp if zero else 1)
        owned = [box for _, _, boxes in rows.state for box in boxes]
        for box in owned:  # it lies in the part as in the layer
            ((_, there),) = rows.part.within(box.in_part)
            assert there == range(box.start, box.start + box.count)
        cells = {cell for own in rows.part.ranges for _, cell in _cells(rows, own.tensors)}
        columns = {column // 24 for name, _, column in cells if name == EXPERTS.name}
        assert columns <= {*range(data % ep * 8 // ep, (data % ep + 1) * 8 // ep)}
        for own in rows.part.ranges:
            among = _cells(rows, own.tensors)
            counted.update(cell for element, cell in among if rows.part.stores(element))
    every = {
        (p.name, row, column)
        for p in parameters
        for row in range(p.matrix[0])
        for column in range(p.matrix[1])
    }
    assert counted == dict.fromkeys(every, 1)
