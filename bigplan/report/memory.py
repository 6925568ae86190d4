"""Used of capacity by tier and stage, and by purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table

from bigplan.placement import Tier
from bigplan.plan import MemoryUse
from bigplan.report.text import PURPOSES, TIER_NAMES, legend, number_range, purpose_bar, table
from bigplan.units import format_bytes, parse_bytes

SHOWN = 9  # rows of a tier; of more, the first stages, the fullest and the last are shown
HARDLY = 1e-3  # of what is used: too little to name
NOTHING = 1 << 20  # less than this is housekeeping, not a use of the tier

Row = tuple[str, MemoryUse]


def memory_table(memory: Sequence[MemoryUse]) -> Table:
    """A bar per tier and stage; equal neighbours share it."""
    shown = [use for use in memory if use.tier is Tier.GPU or use.used_bytes >= NOTHING]
    purposes = {p for use in shown for p, n in use.by_purpose.items() if n}
    title = f"Memory of one GPU; host and NVMe of one node ({legend(sorted(purposes))})"
    rows = table(title, "stage", "tier", "", "used", "by purpose", right=("used",))
    for tier in Tier:
        uses = [use for use in shown if use.tier is tier]
        for stages, use in _shortened(list(_merged(uses))):
            rows.add_row(
                stages,
                TIER_NAMES[tier],
                purpose_bar(use.by_purpose, use.capacity_bytes),
                *_amounts(use),
            )
    return rows


def _merged(uses: Sequence[MemoryUse]) -> Iterator[Row]:
    for _, run in groupby(uses, key=lambda use: use.model_copy(update={"stage": 0})):
        members = list(run)
        yield number_range([use.stage for use in members]), members[0]


def _shortened(rows: Sequence[Row]) -> Sequence[Row]:
    """Of a long pipeline the first stages, the fullest and the last."""
    if len(rows) <= SHOWN:
        return rows
    fullest = max(rows, key=lambda row: row[1].used_bytes)
    wanted = [*rows[: SHOWN - 2], fullest, rows[-1]]
    return [row for row in rows if row in wanted]


def _amounts(use: MemoryUse) -> tuple[str, str]:
    """Used of capacity, and each purpose's part in the unit of what is used, largest first."""
    unit = format_bytes(use.used_bytes).split()[1]
    size = parse_bytes(f"1 {unit}")
    used, capacity = use.used_bytes / size, use.capacity_bytes / size
    if capacity < 1024:
        told = f"{used:.3g} of {capacity:.3g} {unit}"
    else:
        told = f"{used:.3g} {unit} of {format_bytes(use.capacity_bytes)}"
    ordered = sorted(use.by_purpose.items(), key=lambda item: -item[1])
    ordered = [(name, n) for name, n in ordered if n > HARDLY * use.used_bytes]
    parts = [f"{PURPOSES[name][0]} {_two_digits(nbytes / size)}" for name, nbytes in ordered]
    return told, ", ".join(parts)


def _two_digits(amount: float) -> str:
    """Two significant digits, and no exponent: 116, 36, 1.1."""
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.2g}"
