"""A run as a page: the measured step over the predicted one, then its plan."""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.cost.framework import NATIVE
from bigplan.launcher.record import Record
from bigplan.page.charts.compared import MEASURED, PREDICTED, bars_chart, steps_chart
from bigplan.page.operators import operators_section
from bigplan.page.parts import Chart, Page, PageSection, grid
from bigplan.page.plan_page import memory_section, plan_picture, step_section
from bigplan.page.played import Played, of_events, played
from bigplan.page.sureness import sureness_section
from bigplan.report.decision import decision
from bigplan.report.efficiency import resource_seconds
from bigplan.report.run_report import at_work, comparisons, headline_lines, memory_comparison
from bigplan.report.stages import stages_of


def run_page(record: Record) -> Page:
    """The page of everything in a run's folder."""
    plan, step = record.plan, as_recorded(record)
    measured = None if record.measured is None else at_work(record.measured)
    return Page(
        title=f"{record.folder.name}: {plan.model.name} on {plan.cluster.name}",
        headline=decision(plan, stages_of(plan)),
        sections=(
            PageSection(
                "What happened",
                (*headline_lines(record), *(f"Note: {note}" for note in record.summary.notes)),
                charts=tuple(_training(record)),
            ),
            step_section(plan, step, measured),
            _compared(record),
            memory_section(plan, step),
            *(operators_section(plan) if plan.engine == NATIVE.name else ()),
            sureness_section(plan),
        ),
        picture=lambda: plan_picture(plan, step, measured),
    )


def as_recorded(record: Record) -> Played:
    """The step as predicted when the run began; the plan's promises may be newer.

    Its critical path and memory are known where the plan, played now, gives the same events.
    """
    now, then = played(record.plan), record.predicted
    if then.events == now.events:
        return now
    return of_events(record.plan, then)


def _training(record: Record) -> Iterator[Chart]:
    metrics = record.metrics
    losses = {
        "training": [(m.step, m.loss) for m in metrics if m.loss is not None],
        "validation": [
            (m.step, m.validation_loss) for m in metrics if m.validation_loss is not None
        ],
    }
    shown = {name: points for name, points in losses.items() if points}
    if shown:
        yield Chart("loss", "Loss", "Loss of every step.", steps_chart(shown, "loss"))
    if metrics:
        predicted = record.summary.predicted_step_seconds
        seconds = {
            MEASURED: [(m.step, m.seconds) for m in metrics],
            PREDICTED: [(m.step, predicted) for m in (metrics[0], metrics[-1])],
        }
        yield Chart(
            "seconds",
            "Seconds a step",
            "The slowest rank's; the first step also warms up.",
            steps_chart(seconds, "seconds"),
        )


def _compared(record: Record) -> PageSection:
    """By resource and by kind of action, and memory: predicted beside measured."""
    grids = [grid(table) for table in comparisons(record)]
    grids.append(grid(memory_comparison(record)))
    charts: tuple[Chart, ...] = ()
    if record.measured is not None:
        before = resource_seconds(record.predicted)
        after = resource_seconds(at_work(record.measured))
        rows = {
            name: {MEASURED: after.get(name, 0.0), PREDICTED: before.get(name, 0.0)}
            for name in sorted(
                {*before, *after}, key=lambda n: -max(before.get(n, 0), after.get(n, 0))
            )
            if max(before.get(name, 0.0), after.get(name, 0.0)) > 0
        }
        charts = (
            Chart(
                "compared",
                "Busy seconds of a steady step",
                "Of each resource, in the stage where it works most.",
                bars_chart(rows, "seconds"),
            ),
        )
    return PageSection("Measured and predicted", charts=charts, grids=tuple(grids))
