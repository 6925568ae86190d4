"""Rectangles: parts of a parameter, described independently of the plan and of the rank.

A parameter is a matrix; a vector is a matrix of one row. A rank has some rows (ZeRO), some columns
(tensor parallelism) or both. So rectangles of the whole parameter describe any rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigplan.spec.step import Parameter


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows `first_row` up to `last_row` of a parameter, and columns alike; not empty."""

    parameter: str
    first_row: int
    last_row: int
    first_column: int
    last_column: int

    def __post_init__(self) -> None:
        assert 0 <= self.first_row < self.last_row, self
        assert 0 <= self.first_column < self.last_column, self

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.last_row - self.first_row

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.last_column - self.first_column

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def in_matrix(self) -> tuple[slice, slice]:
        """Index into the whole parameter as a matrix."""
        return slice(self.first_row, self.last_row), slice(self.first_column, self.last_column)

    def within(self, other: Rectangle) -> tuple[slice, slice]:
        """Index of this rectangle in a matrix that holds `other`; `other` must contain it."""
        rows = slice(self.first_row - other.first_row, self.last_row - other.first_row)
        return rows, slice(
            self.first_column - other.first_column, self.last_column - other.first_column
        )

    def shared(self, other: Rectangle) -> Rectangle | None:
        """The intersection; None: it is empty."""
        if self.parameter != other.parameter:
            return None
        rows = max(self.first_row, other.first_row), min(self.last_row, other.last_row)
        columns = (
            max(self.first_column, other.first_column),
            min(self.last_column, other.last_column),
        )
        if rows[0] >= rows[1] or columns[0] >= columns[1]:
            return None
        return Rectangle(self.parameter, *rows, *columns)

    def without(self, other: Rectangle) -> Iterator[Rectangle]:
        """This rectangle without `other`, as at most four rectangles that do not overlap."""
        inner = self.shared(other)
        if inner is None:
            yield self
            return
        rows = inner.first_row, inner.last_row
        columns = self.first_column, self.last_column
        for first_row, last_row, first_column, last_column in (
            (self.first_row, inner.first_row, *columns),
            (*rows, self.first_column, inner.first_column),
            (*rows, inner.last_column, self.last_column),
            (inner.last_row, self.last_row, *columns),
        ):
            if first_row < last_row and first_column < last_column:
                yield Rectangle(self.parameter, first_row, last_row, first_column, last_column)

    def moved(self, rows: int, columns: int) -> Rectangle:
        """The rectangle moved down by `rows` and right by `columns`."""
        return Rectangle(
            self.parameter,
            self.first_row + rows,
            self.last_row + rows,
            self.first_column + columns,
            self.last_column + columns,
        )

    def bands(self, rows: int) -> Iterator[Rectangle]:
        """Its pieces from top to bottom, cut at every multiple of `rows` of the parameter."""
        first = self.first_row
        while first < self.last_row:
            last = min(self.last_row, (first // rows + 1) * rows)
            yield Rectangle(self.parameter, first, last, self.first_column, self.last_column)
            first = last


def whole(parameter: str, rows: int, columns: int) -> Rectangle:
    """The rectangle of a whole parameter with so many rows and columns."""
    return Rectangle(parameter, 0, rows, 0, columns)


def all_of(parameter: Parameter) -> Rectangle:
    """The rectangle of a model's whole parameter; a vector is one row."""
    return whole(parameter.name, *parameter.matrix)


def held(
    parameter: Parameter, ranks: int, rank: int, ep: int = 1, expert: int = 0
) -> Rectangle | None:
    """The part of a parameter that one of `ranks` tensor-parallel ranks has; None: only padding.

    The part is at the beginning of the matrix that the rank holds. The matrix may end with rows of
    padding, which belong to no parameter. Of experts it is of those alone that the rank at place
    `expert` of `ep` has: some columns.
    """
    rows, columns = parameter.local(ranks, ep)
    turn = rank // parameter.holders(ranks)
    before = (0, turn * columns) if parameter.cuts_columns else (turn * rows, 0)
    mine = whole(parameter.name, rows, columns).moved(*before)
    if parameter.experts:
        mine = mine.moved(0, expert * columns)
    return mine.shared(all_of(parameter))


def cut(parameter: str, columns: int, start: int, stop: int) -> Iterator[Rectangle]:
    """At most three rectangles with the elements `start` up to `stop` of a matrix, row by row.

    They are the rest of a row, whole rows, and the beginning of a row.
    """
    while start < stop:
        row, column = divmod(start, columns)
        if column or stop - start < columns:
            last = min(columns, column + stop - start)
            found = Rectangle(parameter, row, row + 1, column, last)
        else:
            found = Rectangle(parameter, row, stop // columns, 0, columns)
        yield found
        start += found.elements
