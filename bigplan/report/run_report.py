"""Predicted against measured, from a run's record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bigplan.launcher.record import Record
from bigplan.report.text import TIER_NAMES, seconds_text, table
from bigplan.units import format_bytes, format_count


def run_report(record: Record) -> RenderableType:
    """Loss and speed of the run, then three tables: resources, actions, memory."""
    parts: list[RenderableType] = [Text("\n".join(_headline(record)))]
    if record.measured is not None:
        predicted, measured = record.predicted, record.measured
        parts += [
            comparison(
                "One steady step by resource (busy seconds)", predicted.busy(), measured.busy()
            ),
            comparison(
                "One steady step by kind of action (seconds)",
                predicted.total_by(lambda event: event.op),
                measured.total_by(lambda event: event.op),
            ),
        ]
    parts.append(_memory_table(record))
    parts += [Text(f"Note: {note}") for note in record.summary.notes]
    return Group(*parts)


def _headline(record: Record) -> Iterator[str]:
    summary, metrics = record.summary, record.metrics
    versions = ", ".join(f"{name} {number}" for name, number in summary.versions.items())
    state = "" if summary.status == "finished" else f", {summary.status}"
    yield f"{record.folder.name}: {record.plan.model.name}, {summary.ranks} rank(s), {versions}"
    if not metrics:
        yield f"No step ended{state}."
        return
    yield (
        f"{summary.steps} steps in {seconds_text(summary.seconds)}{state}; "
        f"loss {metrics[0].loss:.4f} to {metrics[-1].loss:.4f}"
    )
    predicted, measured = summary.predicted_step_seconds, summary.measured_step_seconds
    if measured is not None:
        tokens = record.plan.training.tokens_per_step / measured
        yield (
            f"median step {seconds_text(measured)} measured, {seconds_text(predicted)} predicted "
            f"(x{measured / predicted:.2f}); {format_count(float(f'{tokens:.3g}'))} tokens/s"
        )


def comparison(title: str, predicted: Mapping[str, float], measured: Mapping[str, float]) -> Table:
    """Seconds predicted, measured, and their ratio; the largest first."""
    figures = ("predicted", "measured", "ratio")
    rows = table(title, "", *figures, right=figures)
    names = sorted(
        {*predicted, *measured}, key=lambda n: -max(predicted.get(n, 0.0), measured.get(n, 0.0))
    )
    for name in names:
        before, after = predicted.get(name), measured.get(name)
        if before or after:
            rows.add_row(name, _seconds(before), _seconds(after), _ratio(after, before))
    return rows


def _memory_table(record: Record) -> Table:
    figures = ("promised", "measured", "ratio", "capacity")
    rows = table("Memory at most", "tier", *figures, right=figures)
    for use in record.summary.memory:
        if use.predicted or use.measured:
            rows.add_row(
                f"{TIER_NAMES[use.tier]} per {'GPU' if use.scope == 'gpu' else 'node'}",
                format_bytes(use.predicted),
                "-" if use.measured is None else format_bytes(use.measured),
                _ratio(use.measured, use.predicted),
                format_bytes(use.capacity),
            )
    return rows


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds_text(value)


def _ratio(after: float | None, before: float | None) -> str:
    return f"{after / before:.2f}" if after is not None and before else "-"
