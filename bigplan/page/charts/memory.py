"""Memory in use over a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bigplan.page.charts.looks import PURPOSES, RED, chart, colour, quantity, three, told
from bigplan.page.occupancy import Level
from bigplan.placement import Tier
from bigplan.plan import MemoryUse
from bigplan.report.text import bytes_text
from bigplan.units import format_bytes, parse_bytes

GIB = 1 << 30
TITLES = {Tier.GPU: "GPU memory", Tier.HOST: "host memory", Tier.NVME: "drives"}
HEIGHT = 150
NEAR = 1.5  # a capacity is drawn up to this multiple of the use


def memory_chart(
    levels: Sequence[Level], uses: Sequence[MemoryUse], seconds: float
) -> dict[str, Any]:
    """One tier: `levels` and `uses` of the drawn stages, among which a menu chooses."""
    unit = _unit(uses)
    title = f"{TITLES[uses[0].tier]}, {unit}"
    stages = [use.stage for use in uses]
    size = parse_bytes(f"1 {unit}")
    spec = chart(
        list(_areas(levels, size)),
        height=HEIGHT,
        encoding={"x": quantity("at", "seconds of the step", domain=[0, seconds])},
        layer=[
            {
                "mark": {"type": "area", "interpolate": "step-after"},
                "encoding": {
                    "y": quantity("size", title) | {"stack": True},
                    "color": colour("purpose", _colours(levels)),
                    "order": {"field": "order"},
                    "tooltip": told(("purpose", ""), ("size", unit), ("at", "at second")),
                },
            },
            *_lines(uses, size),
        ],
    )
    if len(stages) > 1:
        menu = {"input": "select", "options": stages, "name": "stage "}
        spec["params"] = [{"name": "stage", "value": stages[0], "bind": menu}]
        for layer in spec["layer"]:
            layer["transform"] = [{"filter": "datum.stage == stage"}]
    return spec


def _lines(uses: Sequence[MemoryUse], size: int) -> Iterator[dict[str, Any]]:
    """The promise, and the capacity where it is near: a far one would flatten the rest."""
    promised = [(use, use.used_bytes, f"promised: {bytes_text(use.used_bytes)}") for use in uses]
    if all(use.capacity_bytes <= NEAR * use.used_bytes for use in uses):
        yield _line(promised, size, below=True)
        there = [(u, u.capacity_bytes, f"there: {bytes_text(u.capacity_bytes)}") for u in uses]
        yield _line(there, size, below=False)
    else:
        of = [(u, n, f"{name} of {bytes_text(u.capacity_bytes)}") for u, n, name in promised]
        yield _line(of, size, below=False)


def _line(
    amounts: Sequence[tuple[MemoryUse, int, str]], size: int, *, below: bool
) -> dict[str, Any]:
    """An amount of each stage as a dashed line with its name."""
    values = [
        {"stage": use.stage, "size": three(nbytes / size), "name": text}
        for use, nbytes, text in amounts
    ]
    text = {"type": "text", "align": "left", "dx": 4, "dy": 8 if below else -7, "x": 0}
    return {
        "data": {"values": values},
        "encoding": {"y": {"field": "size", "type": "quantitative"}, "x": {"value": 0}},
        "layer": [
            {
                "mark": {"type": "rule", "strokeDash": [4, 3], "color": RED, "strokeWidth": 1.5},
                "encoding": {"x2": {"value": "width"}},
            },
            {"mark": text, "encoding": {"text": {"field": "name"}}},
        ],
    }


def _unit(uses: Sequence[MemoryUse]) -> str:
    """The unit of the largest use."""
    return format_bytes(max(use.used_bytes for use in uses)).split()[1]


def _colours(levels: Sequence[Level]) -> dict[str, str]:
    present = {level.purpose for level in levels}
    return {purpose: shade for purpose, shade in PURPOSES.items() if purpose in present}


def _areas(levels: Sequence[Level], size: int) -> Sequence[Mapping[str, Any]]:
    """Every purpose at every moment at which its stage changes, because areas are stacked there."""
    by_stage: dict[int, list[Level]] = defaultdict(list)
    for level in levels:
        by_stage[level.stage].append(level)
    values: list[Mapping[str, Any]] = []
    order = {purpose: number for number, purpose in enumerate(PURPOSES)}
    for stage, members in by_stage.items():
        moments = sorted({m for level in members for m in (level.start, level.end)})
        by_purpose: dict[str, list[Level]] = defaultdict(list)
        for level in members:
            by_purpose[level.purpose].append(level)
        for purpose, runs in by_purpose.items():
            values += [
                {
                    "stage": stage,
                    "purpose": purpose,
                    "order": order.get(purpose, len(order)),
                    "at": three(moment),
                    "size": three(_at(runs, moment) / size),
                }
                for moment in moments
            ]
    return values


def _at(runs: Sequence[Level], moment: float) -> int:
    """The last level that has begun by `moment`; levels follow each other without gaps."""
    begun = [level.nbytes for level in runs if level.start <= moment]
    return begun[-1] if begun else 0
