"""The step lane by lane: predicted, with its critical path, and measured above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bigplan.page.charts.looks import (
    BLUE,
    BROWN,
    GREEN,
    GREY,
    OLIVE,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    TEAL,
    chart,
    colour,
    name,
    quantity,
    told,
)
from bigplan.page.lanes import GROUPS, OTHER, Bar

SHADES = (BLUE, ORANGE, GREEN, TEAL, BROWN, PURPLE, OLIVE, PINK, GREY)
COLOURS = dict(zip((*GROUPS, OTHER), SHADES, strict=True))
ZOOM = "zoom_start"  # Vega-Lite's signal for the zoomed domain of the field `start`
PREDICTED, MEASURED = "predicted", "measured"
ROW, HALF = 22, 13  # pixels: a row of one bar, and of each of two
# A wheel scrolls the page; with a modifier key, which browsers also report for a pinch, it zooms.
WHEEL = "wheel![event.ctrlKey || event.metaKey || event.shiftKey]"


def timeline_chart(drawn: Mapping[str, Sequence[Bar]], seconds: float) -> dict[str, Any]:
    """`drawn`: the bars of the predicted step, and of the measured step if there is one."""
    both = len(drawn) > 1
    values = [_value(bar, run, seconds) for run, members in drawn.items() for bar in members]
    rows = list(dict.fromkeys(bar.row for members in drawn.values() for bar in members))
    hover = told(
        ("what", "action"),
        ("layers", "layers"),
        ("times", "actions in this bar"),
        ("from", "from (s)"),
        ("took", "lasts (s)"),
        ("busy", "busy in it"),
        *([("run", "")] if both else []),
    )
    shared: dict[str, Any] = {
        "x": quantity("start", "seconds of the step", domain=[0, seconds]),
        "x2": {"field": "end"},
        "y": name("row", rows),
    }
    zoom = {"type": "interval", "encodings": ["x"], "zoom": WHEEL}
    height = HALF if both else ROW
    present = {value["group"] for value in values}
    shades = {group: shade for group, shade in COLOURS.items() if group in present}
    # A bar of actions with gaps between them is paler the more gaps it has.
    opacity = quantity("share", "", domain=[0, 1], range=[0.15, 1.0]) | {"legend": None}
    bars: dict[str, Any] = {
        "color": colour("group", shades),
        "opacity": opacity,
        "tooltip": hover,
    }
    if both:
        bars["yOffset"] = {"field": "run", "type": "nominal", "sort": [MEASURED, PREDICTED]}
    return chart(
        values,
        height=height * len(rows) * len(drawn),
        encoding=shared,
        layer=[
            {
                "mark": {"type": "bar", "clip": True, "minBandSize": 4},
                "params": [{"name": "zoom", "select": zoom, "bind": "scales"}],
                "encoding": bars,
            },
            _path(rows),
        ],
    )


def _path(rows: Sequence[str]) -> dict[str, Any]:
    """The critical path as a line at the lower edge of its rows."""
    return {
        "transform": [{"filter": "datum.critical"}],
        "mark": {"type": "rule", "clip": True, "color": RED, "strokeWidth": 3, "yOffset": -1},
        "encoding": {"y": name("row", rows) | {"bandPosition": 1}},
    }


def _value(bar: Bar, run: str, seconds: float) -> dict[str, Any]:
    digits = max(0, 6 - len(str(int(seconds))))
    return {
        "row": bar.row,
        "what": bar.what,
        "group": bar.group,
        "layers": bar.layers,
        "times": bar.times,
        "start": round(bar.start, digits + 1),
        "end": round(bar.end, digits + 1),
        "from": f"{bar.start:.4g}",
        "took": f"{bar.end - bar.start:.3g}",
        "busy": f"{bar.share:.0%}",
        "share": round(bar.share, 2),
        "run": run,
        **({"critical": True} if bar.critical else {}),
    }
