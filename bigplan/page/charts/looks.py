"""Colours, and encodings that several charts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PICTURE_WIDTH = 860  # pixels: as wide as a README shows pictures
# An identifier; nothing is fetched from there.
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"

# Each colour has a contrast of at least 3:1 with white and with the dark page (#14171c). WCAG asks
# that of graphics; tests/page/test_looks.py computes it.
BLUE, ORANGE, GREEN, RED = "#3f78b5", "#c9701a", "#4b8b3b", "#d0433f"
TEAL, PURPLE, BROWN, GREY = "#2f8f8b", "#9a63b0", "#8f6f52", "#7d838c"
OLIVE, PINK = "#8a7d1f", "#c2608f"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, TEAL, RED, BROWN, GREY, OLIVE, PINK)

PURPOSES = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": PURPLE,
    "adapters": OLIVE,
    "slots": TEAL,
    "staging": BROWN,
    "workspace": GREY,
    "processes": RED,
}


def quantity(field: str, title: str, **scale: Any) -> dict[str, Any]:
    """A numeric channel; keywords belong to its scale."""
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {"nice": False} | scale,
    }


def name(field: str, order: Sequence[str], title: str | None = None) -> dict[str, Any]:
    """A channel of names in a given order."""
    axis = {"ticks": False, "domain": False}
    return {"field": field, "type": "nominal", "sort": list(order), "title": title, "axis": axis}


def colour(field: str, colours: Mapping[str, str], title: str | None = None) -> dict[str, Any]:
    """A channel of colours, with a legend above the chart for the names that occur."""
    return {
        "field": field,
        "type": "nominal",
        "title": title,
        "scale": {"domain": list(colours), "range": list(colours.values())},
        "legend": {"orient": "top", "symbolType": "square", "labelLimit": 220},
    }


def told(*channels: tuple[str, str]) -> list[dict[str, Any]]:
    """Fields and titles that hovering shows."""
    return [{"field": field, "title": title} for field, title in channels]


def chart(values: Sequence[Mapping[str, Any]], **parts: Any) -> dict[str, Any]:
    """A chart as wide as its place on the page; its height must be a number.

    Vega-Lite warns if such a width stands beside a height that follows from rows.
    """
    return {
        "$schema": SCHEMA,
        "data": {"values": list(values)},
        "width": "container",
    } | parts


def three(value: float) -> float:
    """The value with four digits: no screen shows more, and the page becomes a third smaller."""
    return float(f"{value:.4g}")
