"""Commands, each imported when it is asked for: importing all took half a second."""

from __future__ import annotations

import inspect
import re
import signal
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from bigplan.cli.interrupts import ended_by
from bigplan.importing import environment, named

# What a user types, in the order of `bigplan --help`: a function, or a Typer of several commands.
COMMANDS = {
    "plan": "bigplan.cli.plan:plan",
    "simulate": "bigplan.cli.plan:simulate",
    "explain": "bigplan.cli.explain:explain",
    "validate": "bigplan.cli.validate:validate",
    "launch": "bigplan.cli.run:launch",
    "report": "bigplan.cli.report:report",
    "doctor": "bigplan.cli.doctor:doctor",
    "clean": "bigplan.cli.clean:clean",
    "evaluate": "bigplan.cli.evaluate:evaluate",
    "export": "bigplan.cli.export:export",
    "config": "bigplan.cli.config:config",
    "detect": "bigplan.cli.describe:detect",
    "profile": "bigplan.cli.profile:profile",
    "models": "bigplan.cli.models:models",
    "clusters": "bigplan.cli.clusters:clusters",
    "schema": "bigplan.cli.describe:schema",
    "import": "bigplan.cli.intake:intake",
    "data": "bigplan.cli.data:data",
    "experiment": "bigplan.cli.experiment:experiment",
    "kernels": "bigplan.cli.kernels:kernels",
}


class CommandGroup(TyperGroup):
    """COMMANDS: all of them for `--help`, for a command that one alone."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{**given, "commands": _Commands()})

    def list_commands(self, ctx: object) -> list[str]:
        """Their names, for which nothing is imported."""
        return list(COMMANDS)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an interrupt that it does not tell of itself is told here.

        Typer, which runs this, ends the program without a word.
        """
        with ended_by():
            return super().invoke(ctx)


class _Commands(Mapping[str, Any]):
    def __getitem__(self, name: str) -> Any:
        return _imported(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@cache
def _imported(name: str) -> Any:
    """As Typer would build it among the others. Raises KeyError for a name of no command."""
    place = COMMANDS[name]
    # An interrupt would be dropped in the import system's callbacks, and pydantic would search
    # everything that is installed for plugins.
    with ended_by(signal.SIGINT), environment(PYDANTIC_DISABLE_PLUGINS="__all__"):
        found = named(place)
    alone = typer.Typer(add_completion=False)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
    else:
        alone.command(name)(found)
    return _flowing(get_group(alone).commands[name])


def _flowing(command: Any) -> Any:
    """Lines of its help joined: Typer keeps where the source ends them, at 100 columns."""
    for inner in getattr(command, "commands", {}).values():
        _flowing(inner)
    joined = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help or ""))
    command.help = joined.replace(" Exit codes:", "\nExit codes:")
    return command
