"""An experiment as a page: every point, those that no other dominates, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bigplan.experiment.pareto import front
from bigplan.experiment.running import StudyOutcome
from bigplan.experiment.shown import (
    accuracy_text,
    best_point,
    failures,
    headline,
    pareto_table,
    point_text,
    points_table,
)
from bigplan.page.charts.compared import TRUST, agreement_chart, scatter_chart
from bigplan.page.charts.looks import BLUE, GREY, ORANGE
from bigplan.page.parts import Chart, Page, PageSection, grid
from bigplan.page.picture import above
from bigplan.report.bill import dollars_text
from bigplan.report.text import bytes_text, seconds_text

BEST, FRONT, BEATEN = "what the file asks for", "unbeaten", "beaten"
FEW = 12  # points; where there are more, dominated ones have no label
SHADES = {BEST: BLUE, FRONT: ORANGE, BEATEN: GREY}


def experiment_page(outcome: StudyOutcome) -> Page:
    """The page of everything in an experiment's folder."""
    charts = (_pareto(outcome), *_measured(outcome))
    planned = any(row.status == "planned" for row in outcome.rows)
    grids = (grid(pareto_table(outcome)),) if planned else ()
    failed = tuple(failures(outcome))
    return Page(
        title=f"{outcome.folder.name}: {outcome.index.file}",
        headline=headline(outcome),
        sections=(
            PageSection("Points", (accuracy_text(outcome),), charts, grids),
            PageSection("Every point", grids=(grid(points_table(outcome, most=None)),)),
            *([PageSection("Why points failed", failed)] if failed else []),
        ),
        picture=lambda: above(*(chart.spec for chart in charts)),
    )


def _pareto(outcome: StudyOutcome) -> Chart:
    """Time over dollars of a million tokens; over memory where no point has a price."""
    best, ahead = best_point(outcome), set(front(outcome.rows))
    priced = any(row.dollars_per_million_tokens is not None for row in outcome.rows)
    points: list[dict[str, Any]] = []
    for number, row in enumerate(outcome.rows):
        if row.status != "planned" or not row.tokens_per_second:
            continue
        dollars, memory = row.dollars_per_million_tokens, (row.gpu_bytes or 0) / 2**30
        if priced and dollars is None:
            continue
        named = f"{number}{point_text(outcome, number)}"
        group = BEST if number == best else FRONT if number in ahead else BEATEN
        points.append(
            {
                "x": float(f"{1e6 / row.tokens_per_second:.4g}"),
                "y": float(f"{dollars if priced else memory:.4g}"),
                "group": group,
                **({"label": named} if group != BEATEN or len(outcome.rows) <= FEW else {}),
                "point": named,
                "step": seconds_text(row.step_seconds or 0.0),
                "GPU memory": bytes_text(row.gpu_bytes or 0),
                "host memory": bytes_text(row.host_bytes or 0),
                "drives": bytes_text(row.nvme_bytes or 0),
                "dollars per 1 M tokens": "-" if dollars is None else dollars_text(dollars),
                "strategy": row.strategy,
            }
        )
    y = "dollars of 1 M tokens" if priced else "GiB of the fullest GPU"
    return Chart(
        "pareto",
        "What each point takes",
        "Further left is faster, lower is cheaper. A point is beaten where another is at least as "
        "good in time, cost, GPU memory and writes to drives."
        + (" Points of clusters without a price are in the table alone." if priced else ""),
        scatter_chart(points, "seconds of 1 M tokens", y, SHADES),
    )


def _measured(outcome: StudyOutcome) -> Iterator[Chart]:
    points = [
        {
            "x": seconds,
            "y": row.step_seconds,
            "group": "A",
            "name": f"point {number}{point_text(outcome, number)}",
            "error": f"{row.step_seconds / seconds - 1:+.1%}",
        }
        for number, found in sorted(outcome.measured.items())
        if (row := outcome.rows[number]).step_seconds and (seconds := found.step_seconds)
    ]
    if points:
        yield Chart(
            "measured",
            "Predicted and measured",
            "On the dashed line the prediction is right.",
            agreement_chart(points, {"A": TRUST["A"]}),
        )
