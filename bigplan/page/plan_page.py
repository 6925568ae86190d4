"""A plan as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bigplan.cost.framework import NATIVE
from bigplan.page.charts.compared import BUSY, ON_PATH, bars_chart
from bigplan.page.charts.memory import memory_chart
from bigplan.page.charts.timeline import PREDICTED, ZOOM, timeline_chart
from bigplan.page.help import Help
from bigplan.page.lanes import MOST_BARS, bars
from bigplan.page.operators import operators_section
from bigplan.page.parts import Chart, ChartSpec, Page, PageSection, grid
from bigplan.page.picture import above
from bigplan.page.played import Played, played
from bigplan.page.rivals import help_section, rivals_section
from bigplan.page.sureness import sureness_section
from bigplan.placement import Tier
from bigplan.plan import MemoryUse, Plan
from bigplan.report.decision import decision, mixes_text
from bigplan.report.plan_report import promise_table
from bigplan.report.stages import stages_of
from bigplan.report.tables import (
    NOTHING,
    TRIFLE,
    bound_text,
    busy_table,
    homes_table,
    kept_back,
    memory_table,
    parts_table,
)
from bigplan.report.today import engine_text
from bigplan.timeline import Timeline

MEMORIES = {
    Tier.GPU: "Memory of one GPU",
    Tier.HOST: "Host memory of one node",
    Tier.NVME: "Drives of one node",
}
PICTURE_BARS = 1000  # bars of a picture, which cannot be zoomed to tell more of them apart
MENU = 8  # stages in a chart's menu: of more, the first, the fullest and the last


def plan_page(plan: Plan, help: Help | None = None) -> Page:  # noqa: A002 -- what would help
    """The page of a plan; `help` is what would help, where that was solved."""
    step = played(plan)
    return Page(
        title=f"{plan.model.name} on {plan.cluster.name}",
        headline=decision(plan, stages_of(plan)),
        sections=(
            PageSection("In short", _short(plan), grids=(grid(promise_table(plan)),)),
            step_section(plan, step),
            memory_section(plan, step),
            *(operators_section(plan) if plan.engine == NATIVE.name else ()),
            *rivals_section(plan),
            *([help_section(plan, help)] if help is not None else []),
            sureness_section(plan),
        ),
        picture=lambda: plan_picture(plan, step),
    )


def _short(plan: Plan) -> tuple[str, ...]:
    mixes = (mixes_text(plan),) if plan.search.mixes else ()
    return engine_text(plan), *mixes, f"Bound by: {bound_text(plan.predicted)}."


def step_section(plan: Plan, step: Played, measured: Timeline | None = None) -> PageSection:
    """The timeline, and where the time goes by resource and by part."""
    predicted = plan.predicted
    return PageSection(
        "The step",
        charts=(timeline(step, measured), resources(plan)),
        grids=(
            grid(busy_table(predicted.busy_seconds, predicted.critical_path, step.seconds)),
            grid(parts_table(predicted.parts)),
        ),
    )


def resources(plan: Plan) -> Chart:
    """Busy seconds of each resource, and the part of them on the critical path."""
    busy, path = plan.predicted.busy_seconds, plan.predicted.critical_path
    names = sorted({*busy, *path}, key=lambda name: -max(busy.get(name, 0), path.get(name, 0)))
    rows = {
        name: {BUSY: busy.get(name, 0.0), ON_PATH: path.get(name, 0.0)}
        for name in names
        if max(busy.get(name, 0.0), path.get(name, 0.0)) > TRIFLE * plan.predicted.step_seconds
    }
    return Chart(
        "resources",
        "Time by resource",
        "Seconds in which each works in a step, predicted, and how many of them are on the "
        "critical path: those add up to the step.",
        bars_chart(rows, "seconds"),
    )


def timeline(step: Played, measured: Timeline | None = None, most: int = MOST_BARS) -> Chart:
    """The step lane by lane and stage by stage; measured stands above predicted where both exist.

    `most`: largest number of bars of each.
    """
    drawn = {PREDICTED: bars(step.events, step.seconds, step.critical, most)}
    seconds, actions = step.seconds, len(step.events)
    if measured is not None:
        drawn["measured"] = bars(measured.events, measured.seconds, most=most)
        seconds, actions = max(seconds, measured.seconds), actions + len(measured.events)
    count = sum(map(len, drawn.values()))
    told = [f"{actions:,} actions"]
    if count < actions:
        told.append(f"drawn as {count:,} bars: short neighbours are one, paler with gaps in it")
    if measured is not None:
        told.append("in each row the measured step stands over the predicted one")
    if step.critical:
        told.append("the red line under bars is the critical path")
    told.append("zoom by the buttons, by Ctrl and the wheel, or by a pinch; drag to move")
    return Chart(
        "timeline",
        "One step, lane by lane",
        f"{'; '.join(told)}.",
        timeline_chart(drawn, seconds),
        zoom=ZOOM,
    )


def memory_section(plan: Plan, step: Played) -> PageSection:
    """Memory in use over the step by tier, and the tier of every kind of tensor."""
    return PageSection(
        "Memory",
        (kept_back(plan.predicted.memory, plan.cluster.group.gpu),),
        charts=tuple(memory_charts(plan, step)),
        grids=(
            grid(memory_table(plan.predicted.memory), without=("",)),
            grid(homes_table(stages_of(plan))),
        ),
    )


def memory_charts(plan: Plan, step: Played) -> Iterator[Chart]:
    """A chart of each tier that the plan uses."""
    for tier in Tier:
        uses = [u for u in plan.predicted.memory if u.tier is tier and u.used_bytes > NOTHING]
        if not uses:
            continue
        shown = _shown(uses)
        stages = {use.stage for use in shown}
        filled = [lv for lv in step.levels if lv.tier is tier and lv.stage in stages]
        yield Chart(
            f"memory-{tier}",
            MEMORIES[tier],
            _memory_text(step, len(uses), len(shown)),
            memory_chart(filled, shown, step.seconds),
        )


def _shown(uses: list[MemoryUse]) -> list[MemoryUse]:
    if len(uses) <= MENU:
        return uses
    fullest = max(uses, key=lambda use: use.used_bytes)
    ends = (uses[0], fullest, uses[-1])
    return [use for use in uses if use in ends]


def _memory_text(step: Played, stages: int, shown: int) -> str:
    text = (
        "What is in use over the step. All that is promised is allocated before the first step; "
        "the difference are rings and slots that wait for their turn."
        if step.whole
        else "At most; when it is used is not known of this step."
    )
    if shown < stages:
        text += f" Of {stages} stages the menu has the first, the fullest and the last."
    return text


def plan_picture(plan: Plan, step: Played, measured: Timeline | None = None) -> ChartSpec:
    """The timeline above the use of each memory."""
    charts = [chart.spec for chart in memory_charts(plan, step)]
    return above(timeline(step, measured, PICTURE_BARS).spec, *map(_one_stage, charts))


def _one_stage(spec: ChartSpec) -> Mapping[str, Any]:
    """The chart of the stage that the page shows first, because a picture has no menu."""
    if "params" not in spec:
        return spec
    first = spec["params"][0]["value"]
    filtered = [{"filter": f"datum.stage == {first}"}]
    layers = [layer | {"transform": filtered} for layer in spec["layer"]]
    made = {key: value for key, value in spec.items() if key != "params"}
    return made | {"layer": layers, "title": f"stage {first}"}
