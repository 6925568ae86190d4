"""Points launched one after another, each through the launcher with a record of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rich.console import Console

from bigplan.engines import ENGINES
from bigplan.errors import BigplanError
from bigplan.experiment.folder import MEASURED, POINTS, RUNS, MeasuredPoint, read_spec, write_spec
from bigplan.experiment.running import StudyOutcome, read_outcome, write_measured
from bigplan.launcher.checkpoints import newest_step
from bigplan.launcher.driver import LaunchOptions, launch
from bigplan.launcher.record import SUMMARY, Record, read_record, read_summary
from bigplan.launcher.resume import read_resumable
from bigplan.plan import load_plan
from bigplan.spec.experiment import Launch


def launch_all(
    outcome: StudyOutcome, measure: Literal["none", "all"] | int, how: Launch, console: Console
) -> StudyOutcome:
    """Launch the points; a failed one is a measurement with its reason, and the next one follows.

    Older measurements are kept, and a launch that was stopped goes on from its checkpoint. A
    KeyboardInterrupt passes. Raises InputError where nothing can be written.
    """
    for number in chosen(outcome, measure):
        key = outcome.index.points[number].key
        path = outcome.folder / MEASURED / f"{key}.json"
        before = read_spec(path, MeasuredPoint)
        if before is None or before.reason:
            console.print(f"Point {number}:", highlight=False)
            write_spec(path, _launched(outcome.folder, key, how, console))
        outcome = read_outcome(outcome.folder, outcome.index)
        write_measured(outcome)
    return outcome


def chosen(outcome: StudyOutcome, measure: Literal["none", "all"] | int) -> tuple[int, ...]:
    """Numbers of the points to launch, in the file's order: those that can run here."""
    able = [
        (row.tokens_per_second or 0.0, number)
        for number, row in enumerate(outcome.rows)
        if row.runs and row.engine and ENGINES[row.engine].missing() is None
    ]
    if measure == "none":
        return ()
    if measure != "all":
        able = sorted(able, key=lambda one: (-one[0], one[1]))[:measure]
    return tuple(sorted(number for _, number in able))


def _launched(folder: Path, key: str, how: Launch, console: Console) -> MeasuredPoint:
    plan, runs = load_plan(folder / POINTS / f"{key}.yaml"), folder / RUNS / key
    how = how.model_copy(update={"run_dir": str(runs)})
    try:
        run = next(_finished(runs), None)
        if run is None:
            last = next(_begun(runs), None)
            if last is None:
                shutil.rmtree(runs, ignore_errors=True)
                run = launch(plan, LaunchOptions(how), console)
            else:
                resumable = read_resumable(last)
                run = launch(resumable.plan, LaunchOptions(how, resumable), console)
        return measured_of(read_record(run), folder)
    except BigplanError as error:
        return MeasuredPoint(reason=" ".join(str(error).split()))


def _finished(runs: Path) -> Iterator[Path]:
    """Runs that ended, though the experiment did not record it."""
    for run in sorted(runs.glob("*")):
        if (run / SUMMARY).is_file() and read_summary(run).status == "finished":
            yield run


def _begun(runs: Path) -> Iterator[Path]:
    """Runs that can go on."""
    yield from (run for run in sorted(runs.glob("*")) if newest_step(run) is not None)


def measured_of(record: Record, folder: Path) -> MeasuredPoint:
    """A run's median step, its largest memory and its last loss."""
    most = {tier: _most(record, tier) for tier in ("gpu", "host", "nvme")}
    run = record.folder.absolute()
    return MeasuredPoint(
        run=str(run.relative_to(folder.absolute())),
        step_seconds=record.summary.measured_step_seconds,
        steps=len(record.metrics),
        loss=record.metrics[-1].loss if record.metrics else None,
        gpu_bytes=most["gpu"],
        host_bytes=most["host"],
        nvme_bytes=most["nvme"],
    )


def _most(record: Record, tier: str) -> int | None:
    rows = [use.measured for use in record.summary.memory if use.tier == tier]
    return max((nbytes for nbytes in rows if nbytes is not None), default=None)
