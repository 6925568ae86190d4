"""Words, bars and tables shared by the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from bigplan.units import format_bytes, format_seconds

BAR = 16
LONG_BAR = 24
PIECE = 8  # characters of a word that are enough on a line; the rest folds
TIER_NAMES = {"gpu": "GPU", "host": "host", "nvme": "NVMe"}

# The purposes of memory, each with a letter and a colour. Letters make a bar readable without
# colours.
PURPOSES = {
    "parameters": ("P", "blue"),
    "gradients": ("G", "green"),
    "optimizer": ("O", "magenta"),
    "activations": ("A", "yellow"),
    "adapters": ("L", "red"),
    "slots": ("s", "cyan"),
    "staging": ("t", "cyan"),
    "workspace": ("w", "white"),
    "processes": ("p", "white"),
}


def seconds_text(seconds: float) -> str:
    """A time with three digits; from 1 s to 10 min in seconds, else in a fitting unit."""
    return f"{seconds:.3g} s" if 1 <= seconds < 600 else format_seconds(float(f"{seconds:.3g}"))


def bytes_text(nbytes: float) -> str:
    """Bytes with three digits."""
    number, unit = format_bytes(nbytes).split()
    return f"{float(f'{float(number):.3g}'):g} {unit}"


def bar(value: float, whole: float) -> str:
    """A bar of fixed width, filled for `value` of `whole`; it is full for larger values."""
    filled = round(BAR * min(1.0, value / whole)) if whole > 0 else 0
    return "█" * filled + "░" * (BAR - filled)


def purpose_bar(by_purpose: Mapping[str, int], capacity: int) -> Text:
    """A bar of the whole capacity: letters for each purpose, dots for free memory.

    The ends of the parts are rounded, not their lengths. So the letters add up to the used part.
    """
    shown, end, used = Text(), 0, 0
    for purpose, (letter, colour) in PURPOSES.items():
        used += by_purpose.get(purpose, 0)
        stop = round(LONG_BAR * min(1.0, used / capacity)) if capacity else 0
        shown.append(letter * (stop - end), colour)
        end = stop
    return shown.append("·" * (LONG_BAR - end), "dim")


def legend(purposes: Sequence[str]) -> str:
    """The meanings of the letters of `purpose_bar`, for the purposes that occur."""
    named = [f"{letter} {name}" for name, (letter, _) in PURPOSES.items() if name in purposes]
    return ", ".join([*named, "· free"])


def number_range(numbers: Sequence[int]) -> str:
    """'3' for one number, '0-7' for a run of neighbouring numbers."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def percent(share: float) -> str:
    """A share in percent. A part is never shown as 0% or 100%, but as <1% or >99%."""
    return "<1%" if share < 0.005 else ">99%" if 0.995 < share < 1.0 else f"{share:.0%}"


class FiguresTable(Table):
    """A table that a terminal too narrow for its figures gets as a list: a row's cells in lines."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = sum(_least(column, console, options) for column in self.columns)
        gaps = 2 * len(self.columns)  # a space between columns, one that pads, one at either end
        if least + gaps <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        yield Text(str(self.title), self.title_style or "")
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            for at, (column, cell) in enumerate(zip(self.columns, cells, strict=True)):
                shown = console.render_str(cell) if isinstance(cell, str) else Text(str(cell))
                if (said := shown.plain.strip()) not in ("", "-"):
                    line = Text(f"{column.header} {said}".strip())
                    yield Padding(line, (0, 0, 0, 2 if at else 0))
        yield Text()


def _least(column: Column, console: Console, options: ConsoleOptions) -> int:
    """Characters with which a column still tells what it has: figures and `whole` names in full."""
    sizes = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
    if column.no_wrap:
        return max(size.maximum for size in sizes)
    word = max(size.minimum for size in sizes)
    return word if column.justify == "right" else min(word, PIECE)


def table(title: str, *columns: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
    """An empty table in the common style.

    Columns in `right` are aligned to the right. Columns in `whole` never wrap: they hold names that
    somebody may type, so on a narrow terminal the other columns become narrower.
    """
    made = FiguresTable(
        title=title,
        min_width=len(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        # Half of a word on each of two lines is still the word; half of a number is another number.
        if name in right:
            made.add_column(name, justify="right", no_wrap=name in whole, overflow="ellipsis")
        else:
            made.add_column(name, no_wrap=name in whole, overflow="fold")
    return made
