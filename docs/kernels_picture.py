"""Draws a roofline of what `bigplan kernels bench` measured.

    bigplan kernels bench --part norms --out norms.jsonl     # and others, on a GPU
    pip install matplotlib
    python docs/kernels_picture.py roofline.svg norms.jsonl pointwise.jsonl

A point is a case by one way to run it: fp32 operations a second over operations a byte, both of the
same counts, so that points of a case stand above each other and what is lost to the roof is time.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from bigplan.spec.gpu import find_gpu
from bigplan.spec.multiprocessor import find_multiprocessor

WAYS = {
    "predicted": ("_", "#666666"),
    "eager": (".", "#c9c9c9"),
    "compile": ("x", "#d17a22"),
    "liger": ("+", "#8a9a5b"),
    "quack": ("1", "#b56576"),
    "generated": ("o", "#2a6f97"),
}
LEAST, MOST = 0.2, 100.0  # operations a byte


def main() -> None:
    """Draw it."""
    records = [
        json.loads(line) for name in sys.argv[2:] for line in Path(name).read_text().splitlines()
    ]
    machine = next(one for one in records if one["kind"] == "machine")
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    _roof(axes, machine)
    for way, (marker, colour) in WAYS.items():
        points = list(_points(records, way))
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, color=colour, s=22, label=way)
    axes.set(xscale="log", yscale="log", xlim=(LEAST, MOST), title=machine["device"])
    axes.set_xlabel("fp32 operations a byte that must move")
    axes.set_ylabel("fp32 operations a second (10^12)")
    axes.legend(fontsize="small")
    figure.savefig(sys.argv[1], metadata={"Date": None})


def _points(records: list[dict[str, Any]], way: str) -> Iterator[tuple[float, float]]:
    for one in records:
        if one["kind"] != "case" or not one["operations"]:
            continue
        seconds = (
            one["predicted"] if way == "predicted" else one["ways"].get(way, {}).get("seconds")
        )
        if seconds:
            yield one["operations"] / one["bytes"], one["operations"] / seconds / 1e12


def _roof(axes: plt.Axes, machine: dict[str, Any]) -> None:
    """Bandwidth of a copy of the same run, nominal bandwidth, and what all lanes start at most."""
    gpu, sm = (find(machine["priced_for"]) for find in (find_gpu, find_multiprocessor))
    top = sm.lanes * sm.clock * gpu.multiprocessors
    rates = ((machine["copy"], "-", "copy"), (gpu.memory_bandwidth, "--", "nominal"))
    for rate, style, name in rates:
        edge = top / rate
        axes.plot(
            (LEAST, edge, MOST), (LEAST * rate / 1e12, top / 1e12, top / 1e12), style,
            color="#333333", linewidth=1, label=f"{name}: {rate / 1e12:.2f} TB/s",
        )  # fmt: skip


if __name__ == "__main__":
    main()
