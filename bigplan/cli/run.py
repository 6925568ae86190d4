"""`bigplan launch` and `bigplan report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bigplan.cli.options import (
    ExperimentOptions,
    experiment_of,
    plan_options_given,
    takes,
)
from bigplan.cli.plan import plan_experiment
from bigplan.errors import InputError
from bigplan.plan import Plan, load_plan
from bigplan.spec.document import load_data, read_text
from bigplan.spec.experiment import Launch


@takes(ExperimentOptions)
def launch(
    options: ExperimentOptions,
    what: Annotated[
        Path | None,
        typer.Argument(help="A plan, or an experiment to plan first.", metavar="[PLAN|EXPERIMENT]"),
    ] = None,
) -> None:
    """Run a plan through Ray, then show measured beside predicted.

    An experiment is planned first, for what can be executed here unless it says otherwise.
    On a Ray cluster every node needs bigplan[launch] installed.
    Exit codes: 0, 2 bad input or refused, 3 nothing fits, 4 this machine has less than the plan
    promises, 5 a worker failed, 130 interrupted.
    """
    from bigplan.launcher.driver import LaunchOptions
    from bigplan.launcher.driver import launch as launch_plan
    from bigplan.launcher.record import read_record
    from bigplan.launcher.session import require_packages
    from bigplan.report.run_report import run_report

    require_packages()
    _check_steps(options)
    console = Console()
    if what is not None and _is_plan(what):
        given = plan_options_given(options)
        if given:
            names = ", ".join(given)
            raise InputError(
                f"{what} is a plan: its decisions are made, so {names} cannot change any more; "
                "launch the experiment instead, or leave the option out"
            )
        plan, run = load_plan(what), Launch()
    else:
        plan, run = _planned(what, options, console)
    how = LaunchOptions(
        steps=options.steps or run.steps,
        address=options.address or run.address,
        run_dir=Path(options.run_dir or run.run_dir).expanduser(),
    )
    folder = launch_plan(plan, how, console)
    console.print(run_report(read_record(folder)))


def _is_plan(path: Path) -> bool:
    data, _ = load_data(read_text(path), str(path))
    return isinstance(data, dict) and "placement" in data


def _planned(
    path: Path | None, options: ExperimentOptions, console: Console
) -> tuple[Plan, Launch]:
    experiment = experiment_of(path, options)
    if "engine" not in experiment.model_fields_set:
        experiment = experiment.model_copy(update={"engine": "native"})
    plan = plan_experiment(experiment, keeps_best=False).plan
    from bigplan.report.decision import decision
    from bigplan.report.stages import stages_of

    console.print(decision(plan, stages_of(plan)), highlight=False)
    return plan, experiment.launch


def _check_steps(options: ExperimentOptions) -> None:
    if options.steps is not None and options.steps < 1:
        raise InputError(f"--steps {options.steps}: run at least 1 step")


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/my-model-1.")],
) -> None:
    """Show a run: predicted against measured, by resource, by action and by memory tier."""
    from bigplan.launcher.record import read_record
    from bigplan.report.run_report import run_report

    Console().print(run_report(read_record(run)))
