"""A plan's operators: how close each comes to what the GPU can do."""

from __future__ import annotations

from bigplan.cost.operators import Bound
from bigplan.page.charts.roofline import roofline_chart
from bigplan.page.parts import Chart, PageSection, grid
from bigplan.plan import Plan
from bigplan.planner import seen
from bigplan.report.explain import (
    advice_lines,
    efficiency_lines,
    explain,
    moves_table,
    operators_table,
)


def operators_section(plan: Plan) -> tuple[PageSection, PageSection]:
    """The roofline with every operator, how well the GPU is used, and advice."""
    found = explain(plan)
    gpu, precision = seen(plan).cluster.group.gpu, plan.training.precision
    layers = [row for row in found.rows if row.of_layers]
    placed = [r for r in layers if r.nbytes and r.seconds and r.bound != Bound.COMMUNICATION]
    chart = Chart(
        "roofline",
        "Roofline: every operator",
        f"{len(placed)} operators of forward, backward and recomputation, as large as their time "
        "in the step; collectives are in the table alone. The grey roof is what the GPU's peak and "
        "its nominal memory bandwidth allow. Near the left edge stand operators that only move: as "
        "far below the roof as the bandwidth that they reach is below the memory's.",
        roofline_chart(layers, {precision: gpu.peak(precision)}, gpu.memory_bandwidth),
    )
    moves = [row for row in found.rows if not row.of_layers]
    return (
        PageSection(
            "Operators",
            tuple(efficiency_lines(found.efficiency, found.monitor)),
            charts=(chart,),
            grids=(
                grid(operators_table(layers), folded=True),
                grid(moves_table(moves), folded=True),
            ),
        ),
        PageSection("Advice", tuple(line.removeprefix("- ") for line in advice_lines(found))),
    )
