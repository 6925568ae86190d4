"""Words, bars and tables shared by the reports."""

from __future__ import annotations

from rich import box
from rich.table import Table

from bigplan.units import format_seconds

BAR = 16
TIER_NAMES = {"gpu": "GPU", "host": "host", "nvme": "NVMe"}


def seconds_text(seconds: float) -> str:
    """Seconds with three digits, in seconds up to ten minutes."""
    return f"{seconds:.3g} s" if 1 <= seconds < 600 else format_seconds(float(f"{seconds:.3g}"))


def bar(value: float, whole: float) -> str:
    """A bar of fixed width; more than the whole is shown full."""
    filled = round(BAR * min(1.0, value / whole)) if whole > 0 else 0
    return "█" * filled + "░" * (BAR - filled)


def table(title: str) -> Table:
    """The look of every table."""
    return Table(
        title=title,
        min_width=len(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
