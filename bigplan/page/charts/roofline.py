"""Operators under the GPU's roofs: FLOP/s over FLOP per byte, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any

from bigplan.cost.operators import Bound
from bigplan.page.charts.looks import BLUE, GREY, ORANGE, PURPLE, RED, chart, colour, told
from bigplan.report.operators import OperatorRow
from bigplan.report.text import seconds_text
from bigplan.units import format_bandwidth, format_flops

BOUNDS = {
    Bound.COMPUTE.value: BLUE,
    Bound.POWER.value: RED,
    Bound.MEMORY.value: ORANGE,
    Bound.LATENCY.value: PURPLE,
}
LEFT = 10.0  # FLOP per byte at the left edge, unless an operator has fewer
EDGE = 1.4  # times the left edge: the place of operators that only move bytes
HEIGHT = 340


def roofline_chart(
    rows: Sequence[OperatorRow], roofs: dict[str, float], bandwidth: float
) -> dict[str, Any]:
    """`roofs`: peak FLOP/s by name; `bandwidth`: bytes/s of device memory. No collectives.

    Operators that only move bytes stand near the left edge. Their distance below the roof is the
    distance of their bytes/s below the memory's.
    """
    timed = [row for row in rows if row.seconds and row.bound != Bound.COMMUNICATION]
    reached = [row.intensity for row in timed if row.intensity]
    most = max([roof / bandwidth for roof in roofs.values()] + reached)
    right = 10.0 ** ceil(log10(most) + 0.3)
    left = min([LEFT] + [10.0 ** floor(log10(x)) for x in reached])
    values = [_value(row, EDGE * left) for row in timed if row.nbytes]
    roof = [_roofs(roofs, bandwidth, (left, right)), _names(roofs, bandwidth, right)]
    return chart(
        values, height=HEIGHT, layer=[*roof, *([_points((left, right))] if values else [])]
    )


def _points(ends: tuple[float, float]) -> dict[str, Any]:
    size = {"field": "seconds", "type": "quantitative", "scale": {"range": [25, 700]}}
    shape = {"field": "phase", "type": "nominal", "title": "", "legend": {"orient": "top"}}
    return {
        "mark": {"type": "point", "filled": True, "opacity": 0.85},
        "encoding": {
            "x": _log("x", "FLOP per byte", list(ends)),
            "y": _log("y", "FLOP/s"),
            "size": size | {"legend": None},
            "color": colour("bound", BOUNDS, "bound by"),
            "shape": shape,
            "tooltip": told(
                ("name", "operator"),
                ("where", "layer"),
                ("phase", "pass"),
                ("time", "time in a step"),
                ("rate", "reaches"),
                ("bound", "bound by"),
            ),
        },
    }


def _log(field: str, title: str, domain: list[float] | None = None) -> dict[str, Any]:
    scale: dict[str, Any] = {"type": "log", "nice": False}
    if domain is not None:
        scale["domain"] = domain
    axis = {"format": "~s", "tickCount": 6, "gridOpacity": 0.5}
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": scale,
        "axis": axis,
    }


def _roofs(roofs: dict[str, float], bandwidth: float, ends: tuple[float, float]) -> dict[str, Any]:
    """Each roof rises with the memory's bandwidth and is flat from its corner on."""
    left, right = ends
    values = [
        {"roof": name, "x": x, "y": min(x * bandwidth, roof)}
        for name, roof in roofs.items()
        for x in (left, roof / bandwidth, right)
    ]
    return {
        "data": {"values": values},
        "mark": {"type": "line", "color": GREY, "strokeWidth": 2},
        "encoding": {
            "x": _log("x", "FLOP per byte", [left, right]),
            "y": _log("y", "FLOP/s"),
            "detail": {"field": "roof"},
        },
    }


def _names(roofs: dict[str, float], bandwidth: float, right: float) -> dict[str, Any]:
    """Labels at the end of each flat roof, and at the corner of the lowest one."""
    values: list[dict[str, Any]] = [
        {"x": right, "y": roof, "name": f"{name}: {format_flops(float(f'{roof:.3g}'))}"}
        for name, roof in roofs.items()
    ]
    lowest = min(roofs.values())
    memory = f"memory: {format_bandwidth(float(f'{bandwidth:.3g}'))}"
    text = {"type": "text", "align": "right", "dy": -8, "dx": -4}
    values.append({"x": lowest / bandwidth, "y": lowest, "name": memory})
    return {
        "data": {"values": values},
        "mark": text,
        "encoding": {
            "x": {"field": "x", "type": "quantitative"},
            "y": {"field": "y", "type": "quantitative"},
            "text": {"field": "name"},
        },
    }


def _value(row: OperatorRow, left: float) -> dict[str, Any]:
    intensity = row.intensity or left
    rate = intensity * row.nbytes / row.seconds
    reached = format_flops(float(f"{rate:.3g}"))
    if not row.intensity:
        reached = format_bandwidth(float(f"{row.nbytes / row.seconds:.3g}"))
    return {
        "name": row.name,
        "where": row.where,
        "phase": row.phase,
        "bound": row.bound,
        "x": float(f"{intensity:.4g}"),
        "y": float(f"{rate:.4g}"),
        "seconds": float(f"{row.seconds:.3g}"),
        "time": seconds_text(row.seconds),
        "rate": reached,
    }
