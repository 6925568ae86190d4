"""What a launch leaves behind, one folder a run, and reading it again.

plan.yaml       the plan that ran
metrics.jsonl   one line a step: step, loss, seconds, tokens_per_second
predicted.json  timeline of one steady step, as simulated
measured.json   timeline of the median steady step, as rank 0 measured it
summary.json    totals, memory, versions, notes
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from bigplan.errors import InputError
from bigplan.plan import Plan, load_plan, save_plan
from bigplan.spec.document import Spec, read_text, validate
from bigplan.timeline import Timeline

PLAN, METRICS, SUMMARY = "plan.yaml", "metrics.jsonl", "summary.json"
PREDICTED, MEASURED = "predicted.json", "measured.json"

_TIMELINE = TypeAdapter(Timeline)


class Metric(Spec):
    """One step, over all ranks; `seconds` is the slowest rank's."""

    step: int
    loss: float
    seconds: float
    tokens_per_second: float


class MemoryRow(Spec):
    """Bytes of one tier per GPU or per node: promised, measured at most, and there.

    `measured` is None where the run ended before it was known.
    """

    tier: str
    scope: Literal["gpu", "node"]
    predicted: int
    measured: int | None
    capacity: int


class Summary(Spec):
    """Totals of a run. `seconds` is the wall time of its steps."""

    status: Literal["finished", "interrupted", "failed"]
    steps: int
    ranks: int
    seconds: float
    predicted_step_seconds: float
    measured_step_seconds: float | None
    memory: tuple[MemoryRow, ...]
    versions: dict[str, str]
    notes: tuple[str, ...]
    digest: str
    """of the final weights; empty where the run did not finish"""


@dataclass(frozen=True)
class Record:
    """A run, read back. `measured` is None where no step ended."""

    folder: Path
    plan: Plan
    metrics: tuple[Metric, ...]
    predicted: Timeline
    measured: Timeline | None
    summary: Summary


def new_folder(parent: Path, name: str) -> Path:
    """`parent/name-N` with the first free N, created. Raises InputError."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            folder = parent / f"{stem}-{number}"
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
            else:
                return folder
    except OSError as error:
        raise InputError(f"cannot create a run folder in {parent}: {error.strerror}") from None


def write_start(folder: Path, plan: Plan, predicted: Timeline) -> None:
    """The plan and its predicted step."""
    save_plan(plan, folder / PLAN)
    write_timeline(folder / PREDICTED, predicted)


def append_metric(folder: Path, metric: Metric) -> None:
    """One more step."""
    with (folder / METRICS).open("a") as file:
        file.write(metric.model_dump_json() + "\n")


def write_timeline(path: Path, timeline: Timeline) -> None:
    """A timeline as JSON, every event with its fields by name."""
    path.write_text(json.dumps(asdict(timeline)))


def write_summary(folder: Path, summary: Summary) -> None:
    """The totals."""
    (folder / SUMMARY).write_text(summary.model_dump_json(indent=2) + "\n")


def read_record(folder: Path) -> Record:
    """A run's folder. Raises InputError that names what is missing or broken."""
    if not (folder / SUMMARY).is_file():
        raise InputError(
            f"{folder} holds no {SUMMARY}, so it is no run of `bigplan launch`; "
            "name a folder such as runs/my-model-1"
        )
    measured = folder / MEASURED
    return Record(
        folder=folder,
        plan=load_plan(folder / PLAN),
        metrics=_read_metrics(folder / METRICS),
        predicted=_read_timeline(folder / PREDICTED),
        measured=_read_timeline(measured) if measured.exists() else None,
        summary=validate(_json(folder / SUMMARY), Summary, str(folder / SUMMARY)),
    )


def _read_metrics(path: Path) -> tuple[Metric, ...]:
    if not path.exists():
        return ()
    lines = enumerate(read_text(path).splitlines(), start=1)
    return tuple(
        validate(_parsed(line, f"{path}:{number}"), Metric, f"{path}:{number}")
        for number, line in lines
    )


def _read_timeline(path: Path) -> Timeline:
    try:
        return _TIMELINE.validate_json(read_text(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{path} is no timeline: {first['msg']} at {first['loc']}") from None


def _json(path: Path) -> object:
    return _parsed(read_text(path), str(path))


def _parsed(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(
            f"{where}: not JSON: {error}; was the run cut off while writing?"
        ) from None
