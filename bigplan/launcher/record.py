"""What a launch leaves behind, one folder a run, and reading it again.

plan.yaml       the plan that ran last
launch.json     how it was launched: steps, checkpoints
request.json    what its plan was asked for with (Asked)
metrics.jsonl   one line a step (Metric)
predicted.json  timeline of one steady step, as simulated
measured.json   timeline of the median steady step, as each stage's first rank measured it
summary.json    totals, memory, versions, notes
reference.npz   of pairs of responses: log-probabilities under the first weights (references.py)
checkpoints/    step-000123: the state after step 123
tensorboard/    event files
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal

from pydantic import Field, TypeAdapter, ValidationError

from bigplan.errors import InputError
from bigplan.graph.strategy import Strategy
from bigplan.paths import exists, is_dir, is_file
from bigplan.plan import Plan, load_plan, plan_text
from bigplan.spec.experiment import LaunchSpec
from bigplan.spec.files.document import Spec, validate
from bigplan.spec.files.reading import RECORD, parse_json, read_json, read_text
from bigplan.spec.files.writing import write_whole
from bigplan.spec.sharing import Scope
from bigplan.timeline import Timeline

PLAN, METRICS, SUMMARY = "plan.yaml", "metrics.jsonl", "summary.json"
PREDICTED, MEASURED = "predicted.json", "measured.json"
LAUNCH, REQUEST = "launch.json", "request.json"

_TIMELINE = TypeAdapter(Timeline)
_OF_A_JOB = "working_dir_files"  # where Ray unpacks the --working-dir of jobs
# What to do about a file of a record that cannot be read, and what it costs.
_WITHOUT = {
    METRICS: "or remove that line: the run needs none of its steps on record",
    SUMMARY: "or remove the file: `bigplan launch --resume` writes another",
    PREDICTED: "or remove the file: `bigplan launch --resume` writes another",
    MEASURED: "or remove the file: a launch that runs steps writes another",
    REQUEST: "or remove the file: the run goes on as if nothing had been pinned for its plan",
}


class Metric(Spec):
    """One step, over all ranks; `seconds` is the slowest rank's.

    None stands for what a run does not have (a norm without clipping, a loss scale outside fp16)
    and for what is no finite number.
    """

    step: int = Field(gt=0)
    loss: float | None = None
    uncounted: bool = False
    """no loss: its sequences have no token that the loss counts, such as prompts alone"""
    seconds: float = Field(ge=0)
    tokens_per_second: float = Field(ge=0)
    learning_rate: float | None = None
    gradient_norm: float | None = None
    """before clipping, of the last step whose norm is known"""
    loss_scale: float | None = None
    skipped: bool = False
    """no update: a gradient was infinite or NaN, as in fp16 those of a loss scaled too high"""
    not_finite: tuple[int, ...] | None = None
    """layers with such gradients"""
    data_seconds: float | None = Field(default=None, ge=0)
    """of `seconds`, those in which the slowest rank's compute waited for data"""
    mfu: float | None = None
    memory: Mapping[str, int] = Field(default_factory=dict)
    """bytes by tier so far at most: of the worst GPU, and of the first node's ranks together"""
    validation_loss: float | None = None
    rewards: Mapping[str, float] | None = None
    """of pairs of responses: accuracy, margin, chosen, rejected; None: none are learned from"""
    validation_rewards: Mapping[str, float] | None = None
    checkpoint: int | None = None
    """the step whose state was written during this one"""
    restarts: int | None = None
    """how often the run had started again by itself; None: never"""

    @property
    def loss_text(self) -> str:
        """The loss as it is told."""
        if self.uncounted:
            return "of no token"
        return "not finite" if self.loss is None else f"{self.loss:.4f}"


class Restart(Spec):
    """A rank was lost after `done` steps, and the run went on after step `back_to`."""

    done: int = Field(ge=0)
    back_to: int = Field(ge=0)
    seconds: float = Field(ge=0)
    """from the loss to the next step's begin"""
    reason: str


class Asked(Spec):
    """What a run's plan was asked for with, beside what the plan holds itself (caps among it)."""

    set: Mapping[str, str | int | float] = Field(default_factory=dict)
    """decisions that were pinned"""
    engine: str = "auto"
    nodes: int = Field(gt=0)
    """at most"""


class PlanRun(Spec):
    """A plan that the run had from the step after `after` on."""

    after: int
    when: str
    """UTC, as ISO 8601 writes it"""
    nodes: int
    strategy: Strategy
    engine: str
    predicted_step_seconds: float
    plan: str
    """SHA-256"""
    reason: str = ""
    """why it is another one than before"""


class MemoryRow(Spec):
    """Bytes of one tier per GPU or per node: promised, measured at most, and there.

    `measured` is None where the run ended before it was known, or no rank can tell.
    """

    stage: int = 0
    tier: str
    scope: Scope
    predicted: int
    measured: int | None
    capacity: int


Status = Literal["running", "finished", "interrupted", "failed"]


class Summary(Spec):
    """Totals of a run. `seconds` are those of its steps on record, of all launches.

    A run that was killed, or goes on, has status "running".
    """

    status: Status
    steps: int = Field(ge=0)
    ranks: int = Field(gt=0)
    seconds: float = Field(ge=0)
    predicted_step_seconds: float = Field(ge=0)
    measured_step_seconds: float | None = Field(ge=0)
    memory: tuple[MemoryRow, ...]
    versions: dict[str, str]
    notes: tuple[str, ...]
    digest: str
    """of the final weights; empty where the run did not finish"""
    target_steps: int | None = None
    checkpoint: int | None = None
    """the step of the newest checkpoint"""
    resumed: tuple[int, ...] = ()
    """steps after which the run went on from a checkpoint"""
    restarts: tuple[Restart, ...] = ()
    plans: tuple[PlanRun, ...] = ()
    """every plan that it had, the first one first"""
    effective: float | None = None
    """share of the last launch's seconds since its first step began that are in steps on record"""


@dataclass(frozen=True)
class Record:
    """A run, read back. `measured` is None where no step ended."""

    folder: Path
    plan: Plan
    metrics: tuple[Metric, ...]
    predicted: Timeline
    measured: Timeline | None
    summary: Summary


def require_place(parent: Path) -> None:
    """Raise InputError where no run folder can be made in `parent`, which need not be there yet."""
    if _OF_A_JOB in parent.parts:
        raise InputError(
            f"the run folder would be in {parent}, which Ray made for this job and removes after "
            "it, with all checkpoints; name another in full with --run-dir"
        )
    there = next(folder for folder in (parent, *parent.parents) if exists(folder))
    if not is_dir(there):
        raise _no_folder(parent, f"{there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _no_folder(parent, f"{there} is not yours to write")


def _no_folder(parent: Path, why: str | None) -> InputError:
    return InputError(
        f"cannot create a run folder in {parent}: {why}; name another folder with --run-dir"
    )


def new_folder(parent: Path, name: str) -> Path:
    """`parent/name-N` with the first free N, created. Raises InputError."""
    require_place(parent)
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
        raise _no_folder(parent, error.strerror) from None


def write_start(
    folder: Path, plan: Plan, how: LaunchSpec, asked: Asked, predicted: Timeline
) -> None:
    """The plan, its predicted step, and how the run is launched, for a resumption."""
    write_whole(folder / PLAN, plan_text(plan))
    write_whole(folder / REQUEST, asked.model_dump_json(indent=2) + "\n")
    write_whole(folder / LAUNCH, how.model_dump_json(indent=2) + "\n")
    write_timeline(folder / PREDICTED, predicted)


def read_launch(folder: Path) -> LaunchSpec:
    """How the run was launched. Raises InputError."""
    return validate(read_json(folder / LAUNCH).data, LaunchSpec, str(folder / LAUNCH))


def read_asked(folder: Path) -> Asked | None:
    """What the run's plan was asked for with; None: the run is older. Raises InputError."""
    path = folder / REQUEST
    with _mended(path):
        return validate(read_json(path).data, Asked, str(path)) if exists(path) else None


def keep_plan(folder: Path, step: int) -> None:
    """Put the plan that ran until a step beside the one that runs on from there."""
    name, number = f"plan-until-step-{step:06}", 1
    path = folder / f"{name}.yaml"
    while exists(path):
        number += 1
        path = folder / f"{name}-{number}.yaml"
    shutil.copyfile(folder / PLAN, path)


def write_timeline(path: Path, timeline: Timeline) -> None:
    """A timeline as JSON, every event with its fields by name."""
    events = [event._asdict() for event in timeline.events]
    write_whole(path, json.dumps({"events": events, "seconds": timeline.seconds}))


def write_summary(folder: Path, summary: Summary) -> None:
    """The totals."""
    write_whole(folder / SUMMARY, summary.model_dump_json(indent=2) + "\n")


def read_record(folder: Path) -> Record:
    """A run's folder. Raises InputError that names what is missing or broken."""
    if not is_file(folder / SUMMARY):
        raise InputError(
            f"{folder} holds no {SUMMARY}, so it is no run of `bigplan launch`; "
            "name a folder such as runs/my-model-1"
        )
    measured = folder / MEASURED
    return Record(
        folder=folder,
        plan=load_plan(folder / PLAN),
        metrics=read_metrics(folder),
        predicted=_read_timeline(folder / PREDICTED),
        measured=_read_timeline(measured) if exists(measured) else None,
        summary=read_summary(folder),
    )


def read_summary(folder: Path) -> Summary:
    """The totals. Raises InputError."""
    path = folder / SUMMARY
    with _mended(path):
        return validate(read_json(path).data, Summary, str(path))


def read_metrics(folder: Path) -> tuple[Metric, ...]:
    """Every step on record; a last line that was cut off by a kill counts as not there.

    Raises InputError.
    """
    path = folder / METRICS
    with _mended(path):
        return tuple(_metrics_in(read_text(path, RECORD), path)) if exists(path) else ()


@contextmanager
def _mended(path: Path) -> Iterator[None]:
    """Lets an error tell the way out besides."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error}, {_WITHOUT[path.name]}") from None


def _metrics_in(text: str, path: Path) -> Iterator[Metric]:
    whole, _, _ = text.rpartition("\n")  # every line is written with its end
    for number, line in enumerate(whole.splitlines(), start=1):
        where = f"{path}:{number}"
        yield validate(parse_json(line, str(path), number).data, Metric, where)


def _read_timeline(path: Path) -> Timeline:
    with _mended(path):
        return _timeline(path)


def _timeline(path: Path) -> Timeline:
    try:
        timeline = _TIMELINE.validate_json(read_text(path, RECORD))
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{path} is no timeline: {first['msg']} at {first['loc']}") from None
    for event in timeline.events:
        if not 0 <= event.start <= event.end < inf:
            raise InputError(
                f"{path} is no timeline: {event.op} of layer {event.layer} is said to last from "
                f"{event.start} s to {event.end} s; time runs forward from 0"
            )
    return timeline
