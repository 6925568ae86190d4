"""The folder of an experiment, and reading it again.

experiment.json     which file, which keys it sweeps, in which order its points stand
points/KEY.json     a point's row, once it is planned
points/KEY.yaml     its plan
measured/KEY.json   what its launch measured
runs/KEY/           records of launches
plans/NUMBER.yaml   plans by the number of their point
results.csv         all rows, and results.parquet where pyarrow is installed
measured.csv        predicted and measured of the points that were launched

KEY is a digest of all that a plan depends on, so a changed file plans again only what changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from bigplan.engines import ENGINES
from bigplan.errors import InputError
from bigplan.experiment.row import StudyRow
from bigplan.paths import is_dir, is_file
from bigplan.plan import digest
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.experiment import Experiment
from bigplan.spec.files.document import Spec, validate
from bigplan.spec.files.reading import read_json
from bigplan.spec.files.shipped import PACKAGE
from bigplan.spec.files.writing import write_whole
from bigplan.spec.sweep import Find

S = TypeVar("S", bound=Spec)

EXPERIMENT = "experiment.json"
POINTS, PLANS, MEASURED, RUNS = "points", "plans", "measured", "runs"
_DIGITS = 16  # hex digits of a key: 64 bits


class StudyEntry(Spec):
    """A point of the file: its key, and the swept keys with their values."""

    key: str
    values: dict[str, Any]


class StudyIndex(Spec):
    """The points of a file, and the questions it asks about them."""

    file: str
    keys: tuple[str, ...]
    points: tuple[StudyEntry, ...]
    prefer: str = "fastest"
    within: float | None = None
    largest: str | None = None
    """the key whose largest value was looked for"""


class MeasuredPoint(Spec):
    """A launch's measurements; `reason` says why there are none."""

    reason: str = ""
    run: str = ""
    """its record, seen from the experiment's folder"""
    step_seconds: float | None = None
    steps: int = 0
    loss: float | None = None
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    nvme_bytes: int | None = None


class Keys:
    """Keys of points: digests of what their plans depend on. Each description is read once."""

    def __init__(self) -> None:
        self._digests: dict[object, str] = {}
        self._engines = sorted(name for name, e in ENGINES.items() if e.missing() is None)

    def of(self, experiment: Experiment, find: Find | None) -> str:
        """The key from descriptions, decisions, the installed engines and bigplan's version."""
        asked = experiment.model_dump(mode="json", exclude={"model", "cluster", "launch"})
        told = {
            "asked": asked,
            "steps": experiment.launch.steps,  # a decay of the learning rate ends with the steps
            "model": self._digest(experiment.model, find_model),
            "cluster": self._digest(experiment.cluster, find_cluster),
            "find": None if find is None else find.model_dump(mode="json"),
            "engines": self._engines,
            "version": _version(),
        }
        text = json.dumps(told, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]

    def _digest(self, named: str | Spec, look_up: Callable[[str], Spec]) -> str:
        if isinstance(named, Spec):
            return digest(named)
        key = (look_up, named)
        if key not in self._digests:
            self._digests[key] = digest(look_up(named))
        return self._digests[key]


@lru_cache(maxsize=1)
def _version() -> str:
    """A digest of bigplan's own source: another version may plan otherwise."""
    whole = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        whole.update(path.read_bytes())
    return whole.hexdigest()


def make_folder(folder: Path) -> None:
    """Make the folder and its parents. Raises InputError, also for one with other files alone."""
    if is_dir(folder) and any(folder.iterdir()) and not is_dir(folder / POINTS):
        raise InputError(
            f"{folder} has files and is no folder of `bigplan experiment run`, which would replace "
            "those called as its own; name a new or empty one with --out"
        )
    try:
        for name in (POINTS, PLANS, MEASURED):
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the experiment's folder {folder}: {error.strerror}; name another one "
            "with --out"
        ) from None


def write_part(path: Path, data: str | bytes) -> None:
    """Write a file of an experiment, all or nothing. Raises InputError."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}; make room there, or name another folder with "
            "--out"
        ) from None


def write_spec(path: Path, spec: Spec) -> None:
    """Write a description as JSON."""
    write_part(path, spec.model_dump_json(indent=1, exclude_none=True) + "\n")


def read_spec(path: Path, schema: type[S]) -> S | None:
    """Read a description; None: there is none. Raises InputError where it is damaged."""
    return validate(read_json(path).data, schema, str(path)) if is_file(path) else None


def read_index(folder: Path) -> StudyIndex:
    """The index of an experiment's folder. Raises InputError where it is none."""
    index = read_spec(folder / EXPERIMENT, StudyIndex)
    if index is None:
        raise InputError(
            f"{folder} holds no {EXPERIMENT}, so it is no folder of `bigplan experiment run`; name "
            "one such as runs/my-experiment"
        )
    return index


def read_row(folder: Path, key: str) -> StudyRow | None:
    """A point's row; None where it has not been planned. Raises InputError."""
    return read_spec(folder / POINTS / f"{key}.json", StudyRow)
