"""The model against measured rows: one prediction a row, and how good each table's are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean, median
from typing import Literal

from bigplan.cost.memory import GIB, framework_memory
from bigplan.cost.run import Run, graph_of, parts_of
from bigplan.graph.graph import Graph
from bigplan.validate.configure import SkippedError, completed, run_of
from bigplan.validate.machines import UnknownMachineError
from bigplan.validate.rows import Row

MEMORY_KINDS = ("nvidia-smi", "reserved", "allocated")


@dataclass(frozen=True, slots=True)
class Scored:
    """One row's prediction beside its measurement; seconds and GiB (as printed)."""

    id: str
    group: str
    trust: str
    status: Literal["scored", "skipped"]
    reason: str = ""
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    error_pct: float | None = None
    predicted_peak_gb: float | None = None
    measured_peak_gb: float | None = None
    parts: Mapping[str, float] | None = None  # seconds by part


@dataclass(frozen=True, slots=True)
class Quality:
    """Errors of several rows, in percent; `bias` is the mean signed error."""

    n: int
    mape: float
    median_ape: float
    bias: float
    spearman: float | None


def score(rows: Sequence[Row]) -> list[Scored]:
    """Every row, priced with its own configuration pinned."""
    return [_scored(row) for row in completed(list(rows))]


def _scored(row: Row) -> Scored:
    try:
        run = run_of(row)
        graph = graph_of(run)
        parts = parts_of(run, graph, run.nodes)
    except (SkippedError, UnknownMachineError) as skipped:
        return Scored(row.id, row.group, row.trust, "skipped", str(skipped))
    except ValueError as refused:  # bigplan's own errors about input, and pydantic's
        told = " ".join(str(refused).split())
        return Scored(row.id, row.group, row.trust, "skipped", f"not priced: {told}")
    seconds, measured = sum(parts.values()), measured_seconds(row, run, graph)
    found = Scored(
        row.id,
        row.group,
        row.trust,
        "skipped",
        "neither step time nor tokens/s were published",
        predicted_step_s=seconds,
        predicted_peak_gb=_peak(row, run, graph),
        measured_peak_gb=row.peak_mem_gb,
        parts=parts,
    )
    if measured is None:
        return found
    error = 100 * (seconds / measured - 1)
    return replace(found, status="scored", reason="", measured_step_s=measured, error_pct=error)


def measured_seconds(row: Row, run: Run, graph: Graph) -> float | None:
    """The step time, or what the throughput says of the batch that is priced; None: neither."""
    if row.step_time_s:
        return row.step_time_s
    if not row.tokens_per_s_per_gpu or not row.n_gpus:
        return None
    sequences = graph.micro_batches * run.strategy.dp * run.strategy.micro_batch
    tokens = sequences * run.training.sequence_length
    return tokens / (row.tokens_per_s_per_gpu * row.n_gpus)


def _peak(row: Row, run: Run, graph: Graph) -> float | None:
    """Peak memory as the row's tool reports it, at most what the GPU has."""
    if row.peak_mem_gb is None:
        return None
    kind = row.mem_kind if row.mem_kind in MEMORY_KINDS else "reserved"
    assert kind is not None
    nbytes = sum(framework_memory(graph, run.execution, run.framework, kind).values())
    return min(nbytes, run.nodes.gpu.memory) / GIB


def group_quality(scored: Iterable[Scored]) -> dict[str, Quality]:
    """Quality of each table without its rows of trust C, and of all rows of trust A."""
    groups: dict[str, list[Scored]] = defaultdict(list)
    for one in scored:
        if one.status == "scored" and one.trust != "C":  # the same columns, results far apart
            groups[one.group].append(one)
            if one.trust == "A":
                groups["all of trust A"].append(one)
    return {name: _quality(members) for name, members in sorted(groups.items())}


def _quality(members: list[Scored]) -> Quality:
    errors = [one.error_pct for one in members if one.error_pct is not None]
    sizes = [abs(error) for error in errors]
    predicted = [one.predicted_step_s or 0.0 for one in members]
    measured = [one.measured_step_s or 0.0 for one in members]
    return Quality(
        len(errors), fmean(sizes), median(sizes), fmean(errors), spearman(predicted, measured)
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation, equal values sharing their mean rank; None for fewer than three rows."""
    if len(a) < 3:
        return None
    x, y = _ranks(a), _ranks(b)
    mean = (len(a) + 1) / 2
    over = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    under = (sum((p - mean) ** 2 for p in x) * sum((q - mean) ** 2 for q in y)) ** 0.5
    found = over / under if under else float("nan")
    return found if isfinite(found) else None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for place in order[start:stop]:
            ranks[place] = (start + stop + 1) / 2
        start = stop
    return ranks
