"""Runners-up, and what makes them slower."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bigplan.plan import Alternative, Plan, StepParts
from bigplan.report.decision import strategy_text
from bigplan.report.seconds import part_seconds
from bigplan.report.text import seconds_text, table

SHOWN = 5
TOLD = 2  # parts named per runner-up
EQUAL = 5e-4  # of the step
WORTH = 0.15  # of the difference: a smaller part does not explain it


def rivals_table(plan: Plan) -> Table:
    """The best plans of other strategies, fastest first."""
    rows = table(
        "Runners-up", "strategy", "step", "slower by", "because of", right=("step", "slower by")
    )
    for other in plan.alternatives[:SHOWN]:
        rows.add_row(
            strategy_text(other.strategy),
            seconds_text(other.step_seconds),
            f"{other.step_seconds / plan.predicted.step_seconds - 1:.1%}",
            why_slower(plan, other),
        )
    return rows


def why_slower(plan: Plan, other: Alternative) -> str:
    """The parts of the step that grow most, and the one that shrinks most, in seconds."""
    lost = other.step_seconds - plan.predicted.step_seconds
    if abs(lost) < EQUAL * plan.predicted.step_seconds:
        return "next to no difference"
    if lost < 0:
        return "about as fast, but not as simple"
    changes = _changes(plan.predicted.parts, other.parts)
    slower = [(s, name) for s, name in changes if s > max(0.0, WORTH * lost)][:TOLD]
    if not slower:
        return "no single part"
    text = ", ".join(f"{name} +{seconds_text(s)}" for s, name in slower)
    saved, name = changes[-1]
    if -saved > WORTH * slower[0][0]:
        text += f", but {name} -{seconds_text(-saved)}"
    return text


def _changes(best: StepParts, other: StepParts) -> Sequence[tuple[float, str]]:
    """Differences in seconds, largest loss first; waiting is named as in the plan that waits."""
    pairs = zip(part_seconds(best).items(), part_seconds(other).items(), strict=True)
    return sorted(
        ((b - a, name if b > a else before) for (before, a), (name, b) in pairs), reverse=True
    )
