"""How sure a plan is: its gaps, its band, and the measured runs that test the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from bigplan.cost.framework import NATIVE
from bigplan.page.charts.compared import TRUST, agreement_chart
from bigplan.page.parts import Chart, Grid, PageSection
from bigplan.plan import Plan
from bigplan.report.plan_report import gap_text
from bigplan.report.text import seconds_text
from bigplan.validate.quality import Quality, group_quality
from bigplan.validate.rows import read_rows
from bigplan.validate.score import Scored, score

COLUMNS = ("table", "runs", "mean error", "median", "bias", "rank correlation")


def sureness_section(plan: Plan) -> PageSection:
    """Gaps, band, and predictions beside published measurements."""
    scored = published()
    predicted = plan.predicted
    lines = [
        f"Four of five runs of this kind took {seconds_text(predicted.step_seconds_low)} to "
        f"{seconds_text(predicted.step_seconds_high)} where {seconds_text(predicted.step_seconds)} "
        "was predicted.",
    ]
    if plan.engine == NATIVE.name:
        lines.append(gap_text(plan))
    return PageSection(
        "How sure this is",
        (*lines, *validation_lines(scored)),
        (validation_chart(scored),),
        (validation_grid(group_quality(scored)),),
    )


@lru_cache(maxsize=1)
def published() -> tuple[Scored, ...]:
    """The shipped measurements with their predictions; pricing them takes a second."""
    return tuple(score(read_rows(None)))


def validation_lines(scored: Sequence[Scored]) -> tuple[str, ...]:
    """Lines that say what the chart shows."""
    used = [one for one in scored if one.status == "scored"]
    whole = group_quality(scored).get("all of trust A")
    if whole is None:
        return ()
    return (
        f"The same model of the machine predicts {len(used)} published runs of other frameworks, "
        f"each with its own configuration: those of trust A within {whole.mape:.1f}% on average, "
        f"the median within {whole.median_ape:.1f}%.",
    )


def validation_chart(scored: Sequence[Scored]) -> Chart:
    """Predicted over measured."""
    points = [
        {
            "x": float(f"{one.measured_step_s:.4g}"),
            "y": float(f"{one.predicted_step_s:.4g}"),
            "group": one.trust,
            "name": one.id,
            "error": f"{one.error_pct:+.1f}%",
        }
        for one in scored
        if one.status == "scored" and one.measured_step_s and one.predicted_step_s
    ]
    return Chart(
        "validation",
        "The model against measured runs",
        "On the dashed line the prediction is right. Trust says how well a publication tells what "
        "was run: A in full, C in part, which counts in no average.",
        agreement_chart(points, TRUST),
    )


def validation_grid(groups: dict[str, Quality]) -> Grid:
    """Errors table by table."""
    rows = tuple(
        (
            name,
            str(one.n),
            f"{one.mape:.1f}%",
            f"{one.median_ape:.1f}%",
            f"{one.bias:+.1f}%",
            "" if one.spearman is None else f"{one.spearman:.3f}",
        )
        for name, one in groups.items()
    )
    figures = frozenset(range(1, len(COLUMNS)))
    return Grid("Measured runs, table by table", COLUMNS, rows, figures, folded=True)
