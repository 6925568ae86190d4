"""The subject of a page: a plan, a run, a cluster or an experiment, found by its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bigplan.errors import InputError, quoted
from bigplan.experiment.folder import EXPERIMENT, read_index
from bigplan.experiment.running import StudyOutcome, read_outcome
from bigplan.launcher.record import SUMMARY, Record, read_record
from bigplan.paths import exists, is_dir, is_file
from bigplan.plan import Plan, load_plan
from bigplan.spec.catalog import find_cluster, list_clusters
from bigplan.spec.cluster import Cluster
from bigplan.spec.experiment import Experiment, load_experiment
from bigplan.spec.files.document import load_document
from bigplan.spec.files.reading import read_text

__all__ = [
    "Cluster",
    "Experiment",
    "PlanFile",
    "Record",
    "StudyOutcome",
    "Subject",
    "find_subject",
]

WANTED = (
    "a plan, the folder of a run or of an experiment, a cluster (a file or a shipped name), or an "
    "experiment's file"
)


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan as read from its file; its promises are not checked yet."""

    path: Path
    plan: Plan


Subject = PlanFile | Record | Cluster | StudyOutcome | Experiment


def find_subject(named: str) -> Subject:
    """The subject with this name. Raises InputError for none, or for none of WANTED."""
    path = Path(named).expanduser()
    try:
        there = exists(path)
    except OSError as error:
        raise InputError(f"{quoted(path)}: {error.strerror}; name {WANTED}") from None
    if is_dir(path):
        return _in_folder(path)
    if there:
        return _in_file(path)
    if named in list_clusters():
        return find_cluster(named)
    raise InputError(
        f"{quoted(path)}: no such file or folder (seen from {Path.cwd()}); name {WANTED}"
    )


def _in_folder(folder: Path) -> Record | StudyOutcome:
    if is_file(folder / SUMMARY):
        return read_record(folder)
    if is_file(folder / EXPERIMENT):
        return read_outcome(folder, read_index(folder))
    raise InputError(
        f"{folder} holds no {SUMMARY} of `bigplan launch` and no {EXPERIMENT} of `bigplan "
        f"experiment run`; name {WANTED}"
    )


def _in_file(path: Path) -> PlanFile | Cluster | Experiment:
    """The subject in a file, told by its top-level keys."""
    keys = set(re.findall(r"^(\w+):", read_text(path), re.MULTILINE))
    if "placement" in keys:
        return PlanFile(path, load_plan(path))
    if "node_groups" in keys:
        return load_document(path, Cluster)
    return load_experiment(path)  # its error says how to run a sweep
