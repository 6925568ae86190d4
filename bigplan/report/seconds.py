"""Where the time goes: by resource, and the busiest GPU's step in parts."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from bigplan.plan import StepParts
from bigplan.report.text import bar, seconds_text, table


def busy_table(busy: Mapping[str, float], step_seconds: float) -> Table:
    """Seconds each resource works during a step (of the busiest stage); the first one binds."""
    rows = table("Time by resource", "resource", "busy", "share of the step", "", right=("busy",))
    ordered = sorted(((s, lane) for lane, s in busy.items() if s > 0), reverse=True)
    for rank, (seconds, lane) in enumerate(ordered):
        share = seconds / step_seconds if step_seconds else 0.0
        shown = f"{bar(seconds, step_seconds)} {share:4.0%}"
        rows.add_row(lane, seconds_text(seconds), shown, "" if rank else "binds")
    return rows


def part_seconds(parts: StepParts) -> dict[str, float]:
    """The parts by what the user calls them, in the order of the step's description."""
    waits = f"waiting ({parts.waits_for} is busiest)" if parts.waits_for else "waiting"
    return {
        "compute": parts.compute,
        "recomputation": parts.recompute,
        "tensor-parallel collectives": parts.collectives,
        "optimizer and norms on the GPU": parts.update,
        "pipeline bubble": parts.bubble,
        waits: parts.waiting,
    }


def parts_table(parts: StepParts) -> Table:
    """The step of the busiest GPU; what it spends nothing on is left out."""
    rows = table("The step of the busiest GPU", "part", "seconds", "share", right=("seconds",))
    named = part_seconds(parts)
    whole = sum(named.values())
    for name, seconds in named.items():
        if seconds > 1e-4 * whole:
            share = f"{bar(seconds, whole)} {seconds / whole:4.0%}"
            rows.add_row(name, seconds_text(seconds), share)
    return rows
