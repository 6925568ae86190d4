"""The commands, and how errors leave the program: a message on stderr and the error's exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer

from bigplan.cli.commands import CommandGroup
from bigplan.cli.interrupts import INTERRUPTED
from bigplan.cli.output import checked_output
from bigplan.errors import BigplanError, InputError, control_character, printable, quoted, shortened
from bigplan.paths import REFUSED

LONGEST_LINE = 3000  # characters of a message; lists of allowed values have up to 2,000

app = typer.Typer(
    name="bigplan",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        from bigplan.commit import full_version

        print(f"bigplan {full_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show version and commit."
        ),
    ] = False,
) -> None:
    """Plan the best way to train a model on a cluster, without a GPU, and run that plan."""


def _told(error: BigplanError) -> str:
    """The message as a terminal may get it: no control characters, no endless line."""
    lines = printable(f"bigplan: {error}").splitlines()
    return "\n".join(shortened(line, LONGEST_LINE) for line in lines)


def _require_text(arguments: list[str]) -> None:
    """Raise InputError for arguments that the terminal would take as commands."""
    for argument in arguments:
        if (found := control_character(argument)) is not None:
            raise InputError(
                f"the argument {quoted(argument)} holds the control character {found!r}; leave "
                "it out, and rename a file that has one in its name"
            )


@contextmanager
def _checked_paths() -> Iterator[None]:
    """A path that the system refuses, such as one in another user's folder, is bad input."""
    try:
        yield
    except OSError as error:
        if error.filename is None or error.errno not in REFUSED:
            raise
        raise InputError(
            f"{error.filename}: {error.strerror}; name another file or folder, or get the right "
            "to this one and to the folders that it is in"
        ) from error


def run() -> None:
    """The command that was asked for. Exits with 0, 2 bad input, 3 infeasible, and so on."""
    try:
        with checked_output(), _checked_paths():
            _require_text(sys.argv[1:])
            app()
    except BigplanError as error:
        with suppress(OSError):  # where no message can be written, the exit code still tells
            print(_told(error), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
