"""The parts of a page. html.py makes HTML of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

ChartSpec = Mapping[str, Any]  # a chart in Vega-Lite's grammar

# Characters that a terminal draws bars with; on a page the charts show the same.
_BARS = str.maketrans("", "", "█░")


@dataclass(frozen=True, slots=True)
class Chart:
    """A Vega-Lite chart. `text` says in words what it shows, as caption and for screen readers.

    `zoom`: the signal that holds the shown domain of x, where the chart can be zoomed; the page has
    buttons for it.
    """

    name: str
    title: str
    text: str
    spec: ChartSpec
    zoom: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: cells are text, `right` has the indices of columns of figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    folded: bool = False  # shown only when opened


@dataclass(frozen=True, slots=True)
class PageSection:
    """A heading, sentences, and tables or charts below them."""

    title: str
    lines: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    grids: tuple[Grid, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """`headline` is the page's message in one sentence; `picture` draws it in short."""

    title: str
    headline: str
    sections: tuple[PageSection, ...]
    picture: Callable[[], ChartSpec]


def grid(table: Table, without: Sequence[str] = (), *, folded: bool = False) -> Grid:
    """A terminal's table with the same columns and words, except columns with these headings."""
    columns = [column for column in table.columns if _plain(column.header) not in without]
    cells = [[_plain(cell).translate(_BARS).strip() for cell in column.cells] for column in columns]
    return Grid(
        title=_plain(table.title or ""),
        columns=tuple(_plain(column.header) for column in columns),
        rows=tuple(zip(*cells, strict=True)),
        right=frozenset(i for i, column in enumerate(columns) if column.justify == "right"),
        folded=folded,
    )


def pairs(title: str, rows: Sequence[tuple[str, str]]) -> Grid:
    """A table of names and values."""
    return Grid(title, ("", ""), tuple(rows))


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain
