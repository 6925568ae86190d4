"""A chart as a picture in a file, drawn without a browser."""

from __future__ import annotations

from typing import Any

from bigplan.page.charts.looks import PICTURE_WIDTH
from bigplan.page.html import VEGA_LITE, require_library
from bigplan.page.parts import ChartSpec

SCALE = 2.0  # pixels of a PNG for each of the chart's, for dense screens
INK, LINE = "#1b1f24", "#d5dae0"

_TEXT = {"labelColor": INK, "titleColor": INK, "titleFontWeight": "normal", "labelFontSize": 12}
CONFIG = {
    "aria": False,  # labels for every bar would be two thirds of the file
    "background": "white",
    "view": {"stroke": LINE},
    "axis": {**_TEXT, "gridColor": LINE, "domainColor": LINE, "tickColor": LINE},
    "legend": {**_TEXT, "columns": 5},
    "axisY": {"labelLimit": 320},
    "text": {"color": INK},
}


def svg(spec: ChartSpec) -> str:
    """The chart as an SVG document. Raises RefusedError without the plotting library."""
    require_library()
    import vl_convert

    return str(vl_convert.vegalite_to_svg(_still(spec), vl_version=VEGA_LITE, config=CONFIG))


def png(spec: ChartSpec) -> bytes:
    """The chart as a PNG. Raises RefusedError without the plotting library."""
    require_library()
    import vl_convert

    found = vl_convert.vegalite_to_png(
        _still(spec), vl_version=VEGA_LITE, config=CONFIG, scale=SCALE
    )
    return bytes(found)


def above(first: ChartSpec, *others: ChartSpec) -> dict[str, Any]:
    """Charts below each other; each has its own colours and axes."""
    members = [_still(spec) for spec in (first, *others)]
    for member in members:
        member.pop("$schema")
    apart = {"color": "independent", "x": "independent", "y": "independent"}
    return {
        "$schema": first["$schema"],
        "vconcat": members,
        "resolve": {"scale": apart, "legend": {"color": "independent"}},
    }


def _still(spec: ChartSpec) -> dict[str, Any]:
    """The chart as wide as a picture, where a page would set the width."""
    made = dict(spec)
    if made.get("width") == "container":
        made["width"] = PICTURE_WIDTH
    return made
