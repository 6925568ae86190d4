"""Small charts that compare figures: resources, rivals, changes, predictions, runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bigplan.page.charts.looks import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PICTURE_WIDTH,
    RED,
    chart,
    colour,
    name,
    quantity,
    told,
)
from bigplan.units import format_bandwidth

BUSY, ON_PATH, NOW = "busy", "on the critical path", "now"
STEP = 16  # pixels of a bar
ROOM = 1.16  # axis over the longest bar, so that its figure has room behind it
MEASURED, PREDICTED = "measured", "predicted"
FIGURES = {BUSY: BLUE, ON_PATH: RED, NOW: BLUE, PREDICTED: BLUE, MEASURED: ORANGE}
TRUST = {"A": BLUE, "B": ORANGE, "C": GREY}


def bars_chart(rows: Mapping[str, Mapping[str, float]], unit: str) -> dict[str, Any]:
    """A row for every name, with a bar for each of FIGURES; all rows have the same figures."""
    most = max(value for figures in rows.values() for value in figures.values())
    values = [
        {"name": row, "figure": figure, "value": float(f"{value:.3g}")}
        for row, figures in rows.items()
        for figure, value in figures.items()
    ]
    figures = list(dict.fromkeys(figure for figures in rows.values() for figure in figures))
    shades = {figure: FIGURES[figure] for figure in figures}
    shade = colour("figure", shades) | ({} if len(figures) > 1 else {"legend": None})
    hover = told(("name", ""), ("figure", ""), ("value", unit))
    return chart(
        values,
        height=STEP * len(values),
        layer=[
            {"mark": "bar", "encoding": {"color": shade, "tooltip": hover}},
            {
                "mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 11},
                "encoding": {"text": {"field": "value"}},
            },
        ],
        encoding={
            "y": name("name", list(rows)),
            "yOffset": {"field": "figure", "type": "nominal", "sort": figures},
            "x": quantity("value", unit, domain=[0, ROOM * most]),
        },
    )


def rates_chart(rates: Mapping[str, float]) -> dict[str, Any]:
    """Bytes/s by name on a logarithmic axis, each with its figure."""
    values = [
        {"name": label, "rate": rate, "text": format_bandwidth(float(f"{rate:.3g}"))}
        for label, rate in rates.items()
    ]
    ends = [min(rates.values()) / 3, max(rates.values()) * 8]  # room for the longest bar's figure
    scale = {"type": "log", "domain": ends, "nice": False}
    axis = {"format": "~s", "tickCount": 6}
    return chart(
        values,
        height=24 * len(values),
        encoding={
            "y": name("name", list(rates)),
            "x": {
                "field": "rate",
                "type": "quantitative",
                "scale": scale,
                "axis": axis,
                "title": "bytes a second",
            },
        },
        layer=[
            {"mark": {"type": "bar", "color": BLUE}, "encoding": {"x2": {"datum": ends[0]}}},
            {
                "mark": {"type": "text", "align": "left", "dx": 5},
                "encoding": {"text": {"field": "text"}},
            },
        ],
    )


def steps_chart(series: Mapping[str, Sequence[tuple[int, float]]], title: str) -> dict[str, Any]:
    """Named lines over the steps of a run."""
    values = [
        {"series": label, "step": step, "value": float(f"{value:.5g}")}
        for label, points in series.items()
        for step, value in points
    ]
    others = iter((BLUE, GREEN, RED))
    shades = {label: FIGURES.get(label) or next(others) for label in series}
    few = max((len(points) for points in series.values()), default=0) <= 60
    return chart(
        values,
        height=220,
        mark={"type": "line", "point": few},
        encoding={
            "x": quantity("step", "step"),
            "y": quantity("value", title, zero=False) | {"scale": {"zero": False}},
            "color": colour("series", shades),
            "tooltip": told(("series", ""), ("step", "step"), ("value", title)),
        },
    )


def scatter_chart(
    points: Sequence[Mapping[str, Any]], x: str, y: str, shades: Mapping[str, str]
) -> dict[str, Any]:
    """Points {x, y, group, name, ...}; hovering shows every other key."""
    hidden = ("x", "y", "group", "label")
    hover = [key for key in (points[0] if points else {}) if key not in hidden]
    half = f"(width || {PICTURE_WIDTH}) / 2 - 14"  # within a chart of several, Vega's width is 0
    middle = sum(f(point["x"] for point in points) for f in (min, max)) / 2 if points else 0.0
    return chart(
        [{**point, "side": "right" if point["x"] > middle else "left"} for point in points],
        height=320,
        layer=[
            {
                "mark": {"type": "point", "filled": True, "size": 130, "opacity": 1},
                "encoding": {
                    "color": colour("group", shades),
                    "tooltip": told(*((key, key) for key in hover), ("x", x), ("y", y)),
                },
            },
            {
                "transform": [{"filter": "isValid(datum.label)"}],
                "mark": {
                    "type": "text",
                    "limit": {"expr": half},
                    "align": {"expr": "datum.side"},
                    "dx": {"expr": "datum.side == 'left' ? 10 : -10"},
                },
                "encoding": {"text": {"field": "label"}},
            },
        ],
        encoding={
            "x": quantity("x", x, zero=False) | {"scale": {"zero": False, "padding": 30}},
            "y": quantity("y", y, zero=False) | {"scale": {"zero": False, "padding": 20}},
        },
    )


def agreement_chart(
    points: Sequence[Mapping[str, Any]], shades: Mapping[str, str]
) -> dict[str, Any]:
    """Predicted over measured seconds on logarithmic axes, with the line where both are equal."""
    ends = [min(p[k] for p in points for k in "xy"), max(p[k] for p in points for k in "xy")]
    line = [{"x": end, "y": end} for end in ends]
    log = {"type": "log", "nice": False, "domain": [ends[0] / 1.3, ends[1] * 1.3]}
    axis = {"format": "~g", "tickCount": 6}
    return chart(
        points,
        height=320,
        layer=[
            {
                "data": {"values": line},
                "mark": {"type": "line", "color": GREY, "strokeDash": [4, 3]},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 34, "opacity": 0.7},
                "encoding": {
                    "color": colour("group", shades),
                    "tooltip": told(
                        ("name", "run"),
                        ("error", "error"),
                        ("x", "measured (s)"),
                        ("y", "predicted (s)"),
                    ),
                },
            },
        ],
        encoding={
            "x": {
                "field": "x",
                "type": "quantitative",
                "scale": log,
                "axis": axis,
                "title": "measured, seconds a step",
            },
            "y": {
                "field": "y",
                "type": "quantitative",
                "scale": log,
                "axis": axis,
                "title": "predicted, seconds a step",
            },
        },
    )
