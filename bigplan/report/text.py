"""Words, bars and tables shared by the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from bigplan.units import format_bytes, format_seconds

BAR = 16
LONG_BAR = 24
TIER_NAMES = {"gpu": "GPU", "host": "host", "nvme": "NVMe"}

# What memory is used for: a letter and a colour. Letters, so that a bar says it without colours.
PURPOSES = {
    "parameters": ("P", "blue"),
    "gradients": ("G", "green"),
    "optimizer": ("O", "magenta"),
    "activations": ("A", "yellow"),
    "slots": ("s", "cyan"),
    "staging": ("t", "cyan"),
    "workspace": ("w", "white"),
    "processes": ("p", "white"),
}


def seconds_text(seconds: float) -> str:
    """Seconds with three digits, in seconds up to ten minutes."""
    return f"{seconds:.3g} s" if 1 <= seconds < 600 else format_seconds(float(f"{seconds:.3g}"))


def bytes_text(nbytes: float) -> str:
    """Bytes with three digits."""
    number, unit = format_bytes(nbytes).split()
    return f"{float(f'{float(number):.3g}'):g} {unit}"


def bar(value: float, whole: float) -> str:
    """A bar of fixed width; more than the whole is shown full."""
    filled = round(BAR * min(1.0, value / whole)) if whole > 0 else 0
    return "█" * filled + "░" * (BAR - filled)


def purpose_bar(by_purpose: Mapping[str, int], capacity: int) -> Text:
    """A bar of the whole capacity, each purpose in its letter; what is free is dots.

    Ends are rounded, not lengths, so that the letters add up to the used part of the bar.
    """
    shown, end, used = Text(), 0, 0
    for purpose, (letter, colour) in PURPOSES.items():
        used += by_purpose.get(purpose, 0)
        stop = round(LONG_BAR * min(1.0, used / capacity)) if capacity else 0
        shown.append(letter * (stop - end), colour)
        end = stop
    return shown.append("·" * (LONG_BAR - end), "dim")


def legend(purposes: Sequence[str]) -> str:
    """What the letters of `purpose_bar` mean, for the purposes that occur."""
    named = [f"{letter} {name}" for name, (letter, _) in PURPOSES.items() if name in purposes]
    return ", ".join([*named, "· free"])


def listed(words: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def number_range(numbers: Sequence[int]) -> str:
    """'3', or '0-7' for neighbours."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def percent(share: float) -> str:
    """Neither 0% nor 100% is said of a part."""
    return "<1%" if share < 0.005 else ">99%" if share > 0.995 else f"{share:.0%}"


def table(title: str, *columns: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
    """The look of every table; `right` names the columns of numbers, `whole` those of names that
    somebody may type: on a narrow terminal the others give way.
    """
    made = Table(
        title=title,
        min_width=len(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        justify: JustifyMethod = "right" if name in right else "left"
        made.add_column(name, justify=justify, no_wrap=name in whole)
    return made
