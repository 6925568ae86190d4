"""What would help, as it was solved again."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bigplan.report.text import seconds_text, table
from bigplan.whatif import Answer, Outcome, helps


def help_report(answer: Answer) -> RenderableType:
    """A row per change that was solved, and the names of those that were not."""
    parts: list[RenderableType] = [help_table(answer.outcomes)] if answer.outcomes else []
    if answer.unasked:
        parts.append(Text(unasked_text(answer.unasked)))
    return Group(*parts)


def help_table(outcomes: Sequence[Outcome]) -> Table:
    """A row per change that was solved."""
    rows = table("What would help (solved again)", "change", "step", "then bound by")
    for outcome in outcomes:
        rows.add_row(outcome.change, step_text(outcome), outcome.bottleneck or "-")
    return rows


def step_text(outcome: Outcome) -> str:
    """'step 3.3 s -> 2.6 s (x1.27)', or that it fits, or that it does not help."""
    before, after = outcome.before_seconds, outcome.step_seconds
    if after is None:
        return "still does not fit" if before is None else "cannot be planned as it stands"
    if before is None:
        return f"fits: step {seconds_text(after)}"
    if not helps(outcome):
        return f"no faster ({seconds_text(after)})"
    return f"{seconds_text(before)} -> {seconds_text(after)} (x{before / after:.2f})"


def unasked_text(changes: Sequence[str]) -> str:
    """What there was no time for."""
    return f"Would this help? {'; '.join(changes)}: `--what-if` solves again with each."
