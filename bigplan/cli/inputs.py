"""Inputs of commands: whether they exist, what they are, and whether a training has all it needs.

A launch checks them before it spends time; a plan warns after it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bigplan.errors import InputError, RefusedError, quoted
from bigplan.launcher.inputs import unreadable_data
from bigplan.paths import exists
from bigplan.spec.catalog import list_clusters, list_models
from bigplan.spec.files.reading import read_text, user_path
from bigplan.spec.hf.peft import adapter_folder
from bigplan.spec.hf.weights import family_of

if TYPE_CHECKING:
    from bigplan.plan import Plan
    from bigplan.spec.experiment import Experiment
    from bigplan.spec.model import ModelSpec
    from bigplan.spec.training import Training


def require_there(path: Path, wanted: str) -> None:
    """Raise InputError where nothing has that name; `wanted` is what the command takes."""
    try:
        there = exists(path)
    except OSError as error:
        raise InputError(f"{quoted(path)}: {error.strerror}; name {wanted}") from None
    if not there:
        raise InputError(
            f"{quoted(path)}: no such file or folder (seen from {Path.cwd()}); name {wanted}"
        )


def is_plan(path: Path) -> bool:
    """Whether the file is a plan, not an experiment, which has no such key. Raises InputError."""
    return re.search("^placement:", read_text(path), re.MULTILINE) is not None


def refuse_plan(path: Path) -> None:
    """Raise InputError where a plan is given in place of an experiment."""
    if is_plan(path):
        raise InputError(
            f"{path} is a plan already, not an experiment: `bigplan launch` runs it, "
            "`bigplan explain` and `bigplan simulate` show it; to plan anew, name the experiment "
            "or the options that it was made from"
        )


def checked_plan(path: Path, plan: Plan | None = None) -> Plan:
    """The plan in the file, or `plan`, which was read from it, with promises made anew.

    Promises that differ from what the decisions give are reported on stderr. Raises InputError.
    """
    from bigplan.engines import engine_of
    from bigplan.plan import load_plan

    read = plan or load_plan(path)
    found = engine_of(read).recheck(read, path)
    if found.note:
        Console(stderr=True).print(
            f"warning: {found.note}", highlight=False, markup=False, soft_wrap=True
        )
    return found.plan


def files_read(experiment: Experiment, path: Path | None) -> Iterator[Path]:
    """Files that a plan is made from: the experiment's, and those it names that are not shipped."""
    if path is not None:
        yield path
    training = experiment.training
    validation = training.validation.data if training.validation else None
    shipped = {"bundled", *list_models(), *list_clusters()}
    adapters = training.lora.weights if training.lora else None
    named = (experiment.model, experiment.cluster, training.data, validation, training.weights)
    for name in (*named, adapters):
        if isinstance(name, str) and name not in shipped:
            yield user_path(name)


def warnings(model: ModelSpec, training: Training) -> Iterator[str]:
    """Reasons why a launch on this machine would be refused, and untrained positions.

    The plan may be meant for another machine.
    """
    hint = "The plan stands; a launch where that is so would be refused"
    for error in unreadable_data(model, training):
        yield f"{error}. {hint}"
    if training.weights is not None:
        try:
            family_of(user_path(training.weights), model)
        except InputError as error:
            yield f"{error}. {hint}"
    if training.lora is not None and training.lora.weights is not None:
        try:
            adapter_folder(user_path(training.lora.weights), model, training.weights)
        except (InputError, RefusedError) as error:
            yield f"{error}. {hint}"
    if training.sequence_length > model.max_sequence_length:
        known = "is described with; it is trained, and exported, with all"
        if training.weights is not None:
            known = "has weights for; the first steps will have to teach it the others"
        yield (
            f"sequence_length {training.sequence_length} is longer than the "
            f"{model.max_sequence_length} positions that {model.name} {known}"
        )
