"""The commands, and how errors leave the program: a message on stderr and the error's exit code."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated

import typer

from bigplan.cli import describe
from bigplan.cli.clean import clean
from bigplan.cli.clusters import clusters
from bigplan.cli.config import config
from bigplan.cli.data import data
from bigplan.cli.doctor import doctor
from bigplan.cli.experiment import experiment
from bigplan.cli.explain import explain
from bigplan.cli.export import export
from bigplan.cli.intake import intake
from bigplan.cli.interrupts import INTERRUPTED
from bigplan.cli.kernels import kernels
from bigplan.cli.models import models
from bigplan.cli.output import checked_output
from bigplan.cli.plan import plan, simulate
from bigplan.cli.profile import profile
from bigplan.cli.report import report
from bigplan.cli.run import launch
from bigplan.cli.validate import validate
from bigplan.errors import BigplanError, InputError, control_character, printable, quoted, shortened

LONGEST_LINE = 3000  # characters of a message; lists of allowed values have up to 2,000

app = typer.Typer(
    name="bigplan",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for command in (
    plan,
    simulate,
    explain,
    validate,
    launch,
    report,
    doctor,
    clean,
    export,
    config,
    describe.detect,
    profile,
    models,
    clusters,
    describe.schema,
):
    app.command()(command)
app.command("import")(intake)
app.add_typer(data, name="data")
app.add_typer(experiment, name="experiment")
app.add_typer(kernels, name="kernels")


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


def run() -> None:
    """The command that was asked for. Exits with 0, 2 bad input, 3 infeasible, and so on."""
    try:
        with checked_output():
            _require_text(sys.argv[1:])
            app()
    except BigplanError as error:
        with suppress(OSError):  # where no message can be written, the exit code still tells
            print(_told(error), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
