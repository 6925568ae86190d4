"""One option of the command line for one key of an experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from bigplan.capabilities.native import NATIVE_TRAINING
from bigplan.cli.completion import one_of
from bigplan.spec.experiment import Experiment
from bigplan.spec.files.problems import models_in

OPTION = "option"  # in a field's metadata: what typer makes of it
WHAT, STEP, ADAM, RUN = "What and where", "Training", "Optimizer", "Run"


def option_of(
    key: str,
    text: str,
    panel: str,
    metavar: str | None = None,
    flag: str = "",
    known: Callable[[str], list[str]] | None = None,
) -> Any:
    """A dataclass's field that is an option for a dotted key of an experiment.

    It is named after the key's last word.

    A value that is one of a few words shows these words, as in the schema. A number stays as it was
    typed: what is wrong with it is told as in a file, and some numbers may have a unit. A list of
    words has commas between them. The help says where the runtime accepts only the default.
    """
    (above, _, name), annotation = key.rpartition("."), field_of(key).annotation
    number = is_number(annotation)
    alone = above == "training" and name in NATIVE_TRAINING
    planned = " Planned only: `launch` refuses all but the default." * alone
    made = typer.Option(
        flag or f"--{name.replace('_', '-')}",
        help=text + planned,
        rich_help_panel=panel,
        metavar=metavar or "|".join(choices(annotation)) or ("N" if number else None),
        autocompletion=known or one_of(choices(annotation)),
    )
    many = any(get_origin(part) is tuple for part in get_args(annotation))
    told = {OPTION: made, "key": key, "number": number, "many": many}
    return field(default=None, metadata=told)


def field_of(key: str) -> FieldInfo:
    """The schema's field of a dotted key of an experiment."""
    first, *rest = key.split(".")
    found = Experiment.model_fields[first]
    for part in rest:
        (model,) = models_in(found.annotation)
        found = model.model_fields[part]
    return found


def choices(annotation: Any) -> list[str]:
    """The words that a value may be; none where the value is not a word, or may be any."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [word for part in get_args(annotation) for word in choices(part)]


def is_number(annotation: Any) -> bool:
    """Whether a value is a number, or may be one."""
    if annotation in (int, float):
        return True
    return get_origin(annotation) is not Literal and any(map(is_number, get_args(annotation)))
