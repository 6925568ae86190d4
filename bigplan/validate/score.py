"""The cost model against measured rows: one prediction beside each row's measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import ValidationError

from bigplan.cost.memory import GIB, framework_memory
from bigplan.cost.run import PricedRun, graph_of, parts_of
from bigplan.errors import quoted
from bigplan.graph.graph import Graph
from bigplan.validate.configure import SkippedError, completed, run_of
from bigplan.validate.machines import UnknownMachineError
from bigplan.validate.rows import PublishedRow

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
    memory_kind: str = ""  # what the measured peak counts
    sweep: str = ""  # the same for all runs that one would choose between
    experts: bool = False


def score(rows: Sequence[PublishedRow]) -> list[Scored]:
    """Every row, priced with its own configuration pinned."""
    return [_scored(row) for row in completed(list(rows))]


def _scored(row: PublishedRow) -> Scored:
    try:
        run = run_of(row)
        graph = graph_of(run)
        parts = parts_of(run, graph, run.nodes)
    except (SkippedError, UnknownMachineError) as skipped:
        return Scored(row.id, row.group, row.trust, "skipped", str(skipped))
    except ValidationError as refused:
        first = refused.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        told = f"{where} {quoted(first['input'])}: {first['msg']}" if where else first["msg"]
        return Scored(row.id, row.group, row.trust, "skipped", f"not priced: {told}")
    except ValueError as refused:  # bigplan's own errors about input
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
        memory_kind=row.mem_kind or "kind not stated",
        sweep=_sweep(row),
        experts=bool(row.moe),
    )
    if measured is None:
        return found
    error = 100 * (seconds / measured - 1)
    return replace(found, status="scored", reason="", measured_step_s=measured, error_pct=error)


def _sweep(row: PublishedRow) -> str:
    """A row's table, model, GPUs and batch: the same text for all runs of a sweep."""
    batch = (row.n_gpus, row.gpu, row.global_batch, row.seq_len)
    return " ".join(map(str, (row.group, row.model_name, *batch)))


def measured_seconds(row: PublishedRow, run: PricedRun, graph: Graph) -> float | None:
    """The row's step time, else that of the priced batch at its throughput; None: neither."""
    if row.step_time_s:
        return row.step_time_s
    if not row.tokens_per_s_per_gpu or not row.n_gpus:
        return None
    sequences = graph.micro_batches * run.strategy.dp * run.strategy.micro_batch
    tokens = sequences * run.training.sequence_length
    return tokens / (row.tokens_per_s_per_gpu * row.n_gpus)


def _peak(row: PublishedRow, run: PricedRun, graph: Graph) -> float | None:
    """Peak memory as the row's tool reports it, at most what the GPU has."""
    if row.peak_mem_gb is None:
        return None
    kind = row.mem_kind if row.mem_kind in MEMORY_KINDS else "reserved"
    assert kind is not None
    nbytes = sum(framework_memory(graph, run.execution, run.framework, kind).values())
    return min(nbytes, run.nodes.gpu.memory) / GIB
