"""The published runs that constants are fitted to, with their weights, and errors by table."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bigplan.cost.run import PricedRun, graph_of
from bigplan.graph.graph import Graph
from bigplan.validate.configure import SkippedError, completed, run_of
from bigplan.validate.machines import UnknownMachineError
from bigplan.validate.rows import PublishedRow, read_rows
from bigplan.validate.score import measured_seconds

WEIGHTS = {"A": 1.0, "B": 0.5, "C": 0.0}
# Small tables would not be heard beside tables of a hundred rows. DeepSpeed's offload table is kept
# out: what prices it is measured or counted, not fitted. So are three tables that check the rest.
TABLE_WEIGHTS = {
    "llmq": 0.0,
    "sailor": 0.0,
    "simumax": 0.0,
    "bsV100": 0.0,  # its source warns of 40% between allocations
    "bs1B3": 0.0,
    "qwen": 0.5,
    "vtrainS": 2.0,
    "seqsel": 4.0,
    "fms": 1.5,
    "megTP": 1.5,
    "mosaic": 0.75,
    "bloomA100": 0.75,
}
SOURCES = {
    "mosaic": ("mosaic",),
    "bloom": ("bloomA100",),
    "vtrain": ("vtrainM", "vtrainS"),
    "megatron tables": ("megTP", "seqsel"),
    "torchtitan": ("titan",),
    "fms": ("fms",),
    "nvidia": ("nemo", "mbridge"),
    "deepspeed offload": ("ds", "stas"),
    "V100": ("bsV100", "bs1B3"),
}


@dataclass(frozen=True)
class Priced:
    """A row that can be priced: its run, its operators (no constant changes them), the truth."""

    row: PublishedRow
    run: PricedRun
    graph: Graph
    seconds: float


def priced_rows(path: Path | None = None) -> list[Priced]:
    """All rows that the model prices: the shipped ones, or a file's."""
    found = []
    for row in completed(read_rows(path)):
        try:
            run = run_of(row)
        except (SkippedError, UnknownMachineError):
            continue
        graph = graph_of(run)
        seconds = measured_seconds(row, run, graph)
        if seconds is not None:
            found.append(Priced(row, run, graph, seconds))
    return found


def weights(rows: list[Priced], left_out: tuple[str, ...]) -> np.ndarray:
    """How much each row counts."""

    def weight(one: Priced) -> float:
        row = one.row
        if row.group in left_out or (one.run.execution.cpu_update and row.group == "ds"):
            return 0.0
        if row.adapter or row.precision == "fp4":
            return 0.0
        return WEIGHTS[row.trust] * TABLE_WEIGHTS.get(row.group, 1.0)

    return np.array([weight(one) for one in rows])


def report(rows: list[Priced], found: np.ndarray, title: str) -> None:
    """Errors by table and trust."""
    print(title)
    tables = defaultdict(list)
    for one, ratio in zip(rows, found, strict=True):
        error = math.exp(ratio) - 1
        tables[f"{one.row.group} ({one.row.trust})"].append(error)
        if one.row.trust == "A":
            tables["all of trust A"].append(error)
    print(f"  {'table':24s} {'rows':>5s} {'MAPE':>7s} {'median':>7s} {'80% in':>7s} {'bias':>7s}")
    for name, errors in sorted(tables.items()):
        sizes = np.abs(errors)
        print(
            f"  {name:24s} {len(errors):5d} {100 * sizes.mean():6.2f}% "
            f"{100 * np.median(sizes):6.2f}% {100 * np.quantile(sizes, 0.8):6.2f}% "
            f"{100 * np.mean(errors):+6.2f}%"
        )
