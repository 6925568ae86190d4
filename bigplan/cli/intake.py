"""`bigplan import`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.given import environment_of, experiment_of, options_for
from bigplan.cli.options import ExperimentOptions
from bigplan.cli.spread import takes
from bigplan.errors import InputError

if TYPE_CHECKING:
    from bigplan.intake.appraisal import Appraisal

SourceTool = Literal["deepspeed", "accelerate", "megatron", "torchtitan"]


@takes(ExperimentOptions)
def intake(
    options: ExperimentOptions,
    file: Annotated[
        Path,
        typer.Argument(
            help="DeepSpeed JSON, accelerate YAML, torchtitan TOML, or a script with Megatron-LM's "
            "arguments."
        ),
    ],
    tool: Annotated[SourceTool, typer.Option("--from", help="Whose file it is.")],
    environment: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            help="A variable that the tool runs with, such as DS_PIN_MEMORY_BACKEND=native.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    better: Annotated[
        bool, typer.Option("--better/--no-better", help="Plan what is faster (default: yes).")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Price what another tool's configuration runs, and say what a better plan gains.

    What the file leaves open comes from the options of `plan`, which win over it. Exit codes: 0, 2
    bad input.
    """
    from bigplan.cli.waiting import Waiting
    from bigplan.intake.appraisal import better_than
    from bigplan.intake.report import appraisal_json, appraisal_report, better_report

    found = _appraisal(file, tool, options, environment_of(environment))
    console = Console()
    if not as_json:
        console.print(appraisal_report(found))
    gained = None
    if better:
        with Waiting("Planning what is faster") as waiting:
            gained = better_than(found, waiting.go_on)
    if as_json:
        print_json(appraisal_json(found, gained))
    elif gained is not None:
        console.print(better_report(found, gained))
        if not isinstance(gained.same, str):
            name, asked = found.setup.engine, options_for(found.request, options)
            told = f"For the first: bigplan plan --engine {name} {asked} --out plan.yaml"
            console.print(told, highlight=False, markup=False, soft_wrap=True)
            console.print(f"then: bigplan config plan.yaml --for {name}", highlight=False)


def _appraisal(
    file: Path, tool: SourceTool, options: ExperimentOptions, environment: Mapping[str, str]
) -> Appraisal:
    """The file's training under the options. Raises InputError."""
    from bigplan.intake import TOOLS, Given
    from bigplan.intake.appraisal import appraised
    from bigplan.intake.completed import completed

    if options.engine is not None:
        raise InputError(
            "--engine: a file is priced by the engine of its tool; leave it out, the fastest of "
            "those that can run here is told besides"
        )
    setup = TOOLS[tool](file, Given(environment, options.precision))
    base = {f"training.{key}": value for key, value in setup.training.items()}
    experiment = experiment_of(None, options, base)
    return appraised(completed(setup, experiment, str(file)), str(file))
