"""Other plans: the runners-up, and plans for a changed cluster."""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.bill import HOUR
from bigplan.graph.told import strategy_text
from bigplan.page.charts.compared import NOW, bars_chart, scatter_chart
from bigplan.page.charts.looks import BLUE, GREY, ORANGE
from bigplan.page.charts.memory import GIB
from bigplan.page.help import Help
from bigplan.page.parts import Chart, PageSection, grid
from bigplan.placement import Tier
from bigplan.plan import Alternative, Plan, fullest
from bigplan.report.bill import dollars_text
from bigplan.report.tables import batch_text, help_table, rivals_table, unasked_text
from bigplan.report.text import bytes_text, seconds_text
from bigplan.whatif import FASTER

TAKEN, FRONT, BEATEN = "taken", "unbeaten", "beaten"
SHADES = {TAKEN: BLUE, FRONT: ORANGE, BEATEN: GREY}
TIERS = {Tier.GPU: "GPU", Tier.HOST: "host memory", Tier.NVME: "drives"}


def rivals_section(plan: Plan) -> Iterator[PageSection]:
    """GPU memory over step time of other strategies' best plans, if there are any."""
    if not plan.alternatives:
        return
    known = [other for other in plan.alternatives if other.memory]
    charts: tuple[Chart, ...] = ()
    if known:
        taken = Alternative(
            strategy=plan.strategy,
            step_seconds=plan.predicted.step_seconds,
            parts=plan.predicted.parts,
            memory=fullest(plan.predicted.memory),
        )
        charts = (_pareto(plan, [taken, *known]),)
    yield PageSection("Runners-up", charts=charts, grids=(grid(rivals_table(plan)),))


def _pareto(plan: Plan, ways: list[Alternative]) -> Chart:
    points = []
    for number, way in enumerate(ways):
        group = TAKEN if number == 0 else (FRONT if _on_front(way, ways) else BEATEN)
        memory = {
            title: bytes_text(way.memory[tier]) if tier in way.memory else "none"
            for tier, title in TIERS.items()
        }
        points.append(
            {
                "x": round(way.step_seconds, 4),
                "y": round(way.memory.get(Tier.GPU, 0) / GIB, 2),
                "group": group,
                "label": strategy_text(way.strategy),
                "step": seconds_text(way.step_seconds),
                **memory,
                **_dollars(plan, way.step_seconds),
            }
        )
    return Chart(
        "rivals",
        "Step time and memory",
        "The best plan of each strategy that was solved to its end: further left is faster, lower "
        "takes less GPU memory. A plan is beaten where another is at least as good in time and in "
        "every memory. Host memory, drives and, where the cluster states a price, dollars "
        "a step are told on hovering.",
        scatter_chart(points, "seconds a step", "GiB of the fullest GPU", SHADES),
    )


def _dollars(plan: Plan, seconds: float) -> dict[str, str]:
    """Dollars of a step, with all nodes paid for; empty where no price is given."""
    group = plan.cluster.group
    price = group.running.price if group.running else None
    if price is None:
        return {}
    return {"dollars a step": dollars_text(price * group.nodes * seconds / HOUR)}


def _on_front(way: Alternative, ways: list[Alternative]) -> bool:
    """Whether no other plan is as good in time and every memory and better in one of them."""
    mine = _figures(way)
    return not any(
        all(a <= b for a, b in zip(_figures(other), mine, strict=True)) and _figures(other) != mine
        for other in ways
    )


def _figures(way: Alternative) -> tuple[float, ...]:
    """Figures with three digits, because plans do not differ in the fourth."""
    figures = (way.step_seconds, *(float(way.memory.get(tier, 0)) for tier in Tier))
    return tuple(float(f"{figure:.3g}") for figure in figures)


def help_section(plan: Plan, help: Help) -> PageSection:  # noqa: A002
    """Changes of the cluster, each solved again."""
    answer, before = help.answer, help.before_seconds
    lines = []
    if plan.predicted.step_seconds > FASTER * before:
        lines.append(
            f"With every decision free this machine is planned at {seconds_text(before)} a step, "
            f"where this plan takes {seconds_text(plan.predicted.step_seconds)}: its decisions "
            "were pinned, or its search was stopped. The changes are held against the free one."
        )
    if answer.batch is not None:
        lines.append(batch_text(answer.batch))
    if answer.unasked:
        lines.append(unasked_text(answer.unasked))
    solved = {o.change: o.step_seconds for o in answer.outcomes if o.step_seconds is not None}
    charts: tuple[Chart, ...] = ()
    if solved:
        rows = {"as it is": before, **solved}
        charts = (
            Chart(
                "help",
                "The step on another machine",
                "Each change was solved as a problem of its own.",
                bars_chart(
                    {row: {NOW: seconds} for row, seconds in rows.items()}, "seconds a step"
                ),
            ),
        )
    if not answer.outcomes and not answer.unasked and answer.batch is None:
        lines.append("Nothing that could be changed holds this plan up.")
    grids = (grid(help_table(answer.outcomes)),) if answer.outcomes else ()
    return PageSection("What would help", tuple(lines), charts, grids)
