"""A run of an experiment: earlier results are kept, the rest is planned and written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bigplan.errors import InputError
from bigplan.experiment.folder import (
    EXPERIMENT,
    MEASURED,
    PLANS,
    POINTS,
    Keys,
    MeasuredPoint,
    StudyEntry,
    StudyIndex,
    make_folder,
    read_row,
    read_spec,
    write_part,
    write_spec,
)
from bigplan.experiment.planning import PlannedPoint, Task, plan_task
from bigplan.experiment.row import StudyRow
from bigplan.experiment.table import measured_table, plan_name, results_table, write_tables
from bigplan.experiment.workers import Lost, results
from bigplan.solve.pins import parse_pins, refuse_unknown_kind
from bigplan.spec.model import ModelSpec
from bigplan.spec.sweep import Point, Studied


@dataclass(frozen=True)
class StudyOutcome:
    """An experiment's folder as read: a row of every point, measurements of launched ones."""

    folder: Path
    index: StudyIndex
    rows: tuple[StudyRow, ...]
    measured: dict[int, MeasuredPoint]


def plan_all(
    studied: Studied, folder: Path, jobs: int, seen: Callable[[int, int], None]
) -> StudyOutcome:
    """Plan every point that has no row yet; `seen` is called with the count done and the total.

    Raises InputError before planning where the file names something that does not exist. A
    KeyboardInterrupt passes; earlier results are kept.
    """
    check(studied)
    make_folder(folder)
    index = _index(studied)
    write_spec(folder / EXPERIMENT, index)
    todo = _todo(studied, index, folder)
    total = len(index.points)
    done = total - len(todo)
    seen(done, total)
    lost: dict[str, StudyRow] = {}
    with closing(results(todo, plan_task, jobs)) as found:
        for result in found:
            if isinstance(result, Lost):
                lost[result.task.key] = StudyRow.failed(
                    result.reason
                )  # not kept, so that it is tried again next time
            else:
                _keep(folder, result)
            done += 1
            seen(done, total)
    rows = [lost.get(entry.key) or read_row(folder, entry.key) for entry in index.points]
    whole = tuple(row for row in rows if row is not None)
    assert len(whole) == total, "each was planned just now, or before"
    _write_plans(folder, index, whole)
    write_tables(folder, "results", results_table(index, whole))
    return StudyOutcome(folder, index, whole, dict(_measured(folder, index)))


def check(studied: Studied) -> None:
    """Look up models, clusters and decisions of all points. Raises InputError with the line."""
    seen = set[object]()
    models: dict[object, ModelSpec] = {}
    for point in studied.points:
        for key, what, look in _lookups(point, models):
            if what in seen:
                continue
            try:
                look()
            except InputError as error:
                text = str(error).removeprefix("--set ")
                raise studied.problem(point, key, f"cannot be used: {text}") from None
            seen.add(what)


# Key, a value that equal lookups share, the lookup.
Lookup = tuple[str, object, Callable[[], object]]


def _lookups(point: Point, models: dict[object, ModelSpec]) -> Iterator[Lookup]:
    experiment = point.experiment
    named, cluster = experiment.model, experiment.cluster

    def model() -> None:
        models[named] = experiment.model_spec()

    yield "model", ("model", named), model
    plain = experiment.model_copy(update={"hardware": {}})
    yield "cluster", ("cluster", cluster), plain.whole_cluster
    for key, value in experiment.hardware.items():
        alone = experiment.model_copy(update={"hardware": {key: value}})
        yield f"hardware.{key}", ("hardware", cluster, key, value), alone.whole_cluster
    for key, value in experiment.set.items():
        look = partial(_pins, models[named], key, value)
        yield f"set.{key}", ("set", named, key, value), look


def _pins(model: ModelSpec, key: str, value: str | int | float) -> None:
    for pin in parse_pins({key: value})[1]:
        refuse_unknown_kind(pin, model.kinds())


def _index(studied: Studied) -> StudyIndex:
    study, keys = studied.study, Keys()
    return StudyIndex(
        file=studied.path.name,
        keys=studied.keys,
        points=tuple(
            StudyEntry(key=keys.of(point.experiment, study.find), values=dict(point.values))
            for point in studied.points
        ),
        prefer=study.prefer,
        within=study.within,
        largest=None if study.find is None else study.find.largest,
    )


def _todo(studied: Studied, index: StudyIndex, folder: Path) -> list[Task]:
    """Points without a row; equal ones are planned once."""
    tasks: dict[str, Task] = {}
    for point, entry in zip(studied.points, index.points, strict=True):
        if read_row(folder, entry.key) is None:
            tasks[entry.key] = Task(entry.key, point.experiment, studied.study.find)
    return list(tasks.values())


def _keep(folder: Path, done: PlannedPoint) -> None:
    """Write the plan before the row, because the row says that both exist."""
    if done.plan:
        write_part(folder / POINTS / f"{done.task.key}.yaml", done.plan)
    write_spec(folder / POINTS / f"{done.task.key}.json", done.row)


def _write_plans(folder: Path, index: StudyIndex, rows: tuple[StudyRow, ...]) -> None:
    shutil.rmtree(folder / PLANS, ignore_errors=True)  # numbers may belong to other points by now
    make_folder(folder)
    for number, (entry, row) in enumerate(zip(index.points, rows, strict=True)):
        if row.status == "planned":
            text = (folder / POINTS / f"{entry.key}.yaml").read_text(encoding="utf-8")
            write_part(folder / plan_name(number), text)


def _measured(folder: Path, index: StudyIndex) -> Iterator[tuple[int, MeasuredPoint]]:
    for number, entry in enumerate(index.points):
        found = read_spec(folder / MEASURED / f"{entry.key}.json", MeasuredPoint)
        if found is not None:
            yield number, found


def read_outcome(folder: Path, index: StudyIndex) -> StudyOutcome:
    """The contents of an experiment's folder; points not yet planned become failed rows.

    Raises InputError.
    """
    rows = tuple(
        read_row(folder, entry.key) or StudyRow.failed("not planned yet; run the experiment again")
        for entry in index.points
    )
    return StudyOutcome(folder, index, rows, dict(_measured(folder, index)))


def write_measured(outcome: StudyOutcome) -> None:
    """Write measured.csv, apart from results.csv, because clocks differ every time."""
    if outcome.measured:
        table = measured_table(outcome.index, outcome.rows, outcome.measured)
        write_tables(outcome.folder, "measured", table)
