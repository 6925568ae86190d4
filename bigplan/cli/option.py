"""One option of the command line for one key of an experiment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from bigplan.capabilities import NATIVE_TRAINING

WHAT, STEP, ADAM, RUN = "What and where", "Training", "Optimizer", "Run"


def option_of(
    key: str,
    text: str,
    panel: str,
    metavar: str | None = None,
    flag: str = "",
    known: Callable[[str], list[str]] | None = None,
) -> Any:
    """An option for a dotted key of an experiment, after whose last word it is called.

    Its help says where the runtime takes nothing but the default.
    """
    name = key.rpartition(".")[2]
    planned = " Planned only: `launch` refuses all but the default." * (name in NATIVE_TRAINING)
    made = typer.Option(
        flag or f"--{name.replace('_', '-')}",
        help=text + planned,
        rich_help_panel=panel,
        metavar=metavar,
        autocompletion=known,
    )
    made.key = key  # which options.keys reads
    return made
