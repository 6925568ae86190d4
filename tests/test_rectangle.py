"""Rectangles of a parameter: what a range of its elements cuts it into."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigplan.rectangle import Rectangle, all_of, cut, whole
from bigplan.spec.step import Parameter

sizes = st.integers(1, 7)


@given(sizes, sizes, st.data())
def test_a_range_is_at_most_three_rectangles_in_its_order(
    rows: int, columns: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, rows * columns))
    stop = data.draw(st.integers(start, rows * columns))
    found = list(cut("w", columns, start, stop))
    elements = [
        row * columns + column
        for one in found
        for row in range(one.first_row, one.last_row)
        for column in range(one.first_column, one.last_column)
    ]
    assert elements == list(range(start, stop))
    assert len(found) <= 3


def _cells(one: Rectangle | None) -> set[tuple[int, int]]:
    if one is None:
        return set()
    rows, columns = range(one.first_row, one.last_row), range(one.first_column, one.last_column)
    return {(row, column) for row in rows for column in columns}


@st.composite
def rectangles(draw: st.DrawFn) -> Rectangle:
    ends = [sorted(draw(st.sets(st.integers(0, 6), min_size=2, max_size=2))) for _ in range(2)]
    return Rectangle("w", *ends[0], *ends[1])


@given(rectangles(), rectangles())
def test_two_share_their_common_cells(one: Rectangle, other: Rectangle) -> None:
    assert _cells(one.shared(other)) == _cells(one) & _cells(other)


@given(rectangles(), rectangles())
def test_what_the_other_lacks_is_cut_into_parts_that_share_nothing(
    one: Rectangle, other: Rectangle
) -> None:
    parts = list(one.without(other))
    cells = [cell for part in parts for cell in _cells(part)]
    assert len(parts) <= 4
    assert len(set(cells)) == len(cells)
    assert set(cells) == _cells(one) - _cells(other)


@given(rectangles(), sizes, sizes)
def test_moved_it_has_as_many_cells_elsewhere(one: Rectangle, rows: int, columns: int) -> None:
    assert _cells(one.moved(rows, columns)) == {(r + rows, c + columns) for r, c in _cells(one)}


def test_another_parameter_shares_nothing() -> None:
    assert whole("a", 2, 3).shared(whole("b", 2, 3)) is None


def test_a_part_knows_its_place_in_what_contains_it() -> None:
    outer = Rectangle("w", 2, 6, 1, 5)
    assert Rectangle("w", 3, 5, 2, 5).within(outer) == (slice(1, 3), slice(1, 4))


@given(rectangles(), sizes)
def test_bands_end_at_multiples_of_their_rows(one: Rectangle, rows: int) -> None:
    bands = list(one.bands(rows))
    assert [band.last_row for band in bands[:-1]] == [band.first_row for band in bands[1:]]
    assert all(band.last_row % rows == 0 for band in bands[:-1])
    assert len({band.first_row // rows for band in bands}) == len(bands)
    assert set().union(*map(_cells, bands)) == _cells(one)


def test_a_vector_is_one_row() -> None:
    assert all_of(Parameter("w", (3, 5), "rows", True)) == whole("w", 3, 5)
    assert all_of(Parameter("b", (5,), "rows", False)) == whole("b", 1, 5)
