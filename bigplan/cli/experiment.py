"""`bigplan experiment run` and `bigplan experiment compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.inputs import require_there
from bigplan.errors import InputError
from bigplan.interrupted import ToldInterrupt
from bigplan.paths import is_file
from bigplan.system import require_linux

if TYPE_CHECKING:  # the solver is slow to import, and `--help` needs none of it
    from bigplan.experiment.running import StudyOutcome
    from bigplan.spec.sweep import Studied

experiment = typer.Typer(
    help="Many experiments from one file: plan all, launch some, compare.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@experiment.command()
def run(
    file: Annotated[
        Path, typer.Argument(help="An experiment YAML with a `sweep`, a `find`, or neither.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the results (default: runs/FILE's name)."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Processes that plan (default: all cores).")
    ] = None,
    launch: Annotated[
        bool | None,
        typer.Option(
            "--launch/--no-launch",
            help="Launch the planned points that run here, one after another (default: as "
            "`measure` in the file says).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan every point of an experiment on all cores, and launch them where asked.

    Ctrl-C, or a crash, loses no point that is done: run it again and it goes on. The same file
    gives the same results.csv, byte by byte. Exit codes: 0, also where points failed, 2 bad input,
    130 interrupted.
    """
    from bigplan.cli.inputs import refuse_plan
    from bigplan.experiment.folder import make_folder
    from bigplan.experiment.running import check
    from bigplan.experiment.workers import usable_cores
    from bigplan.launcher.lock import only_experiment
    from bigplan.spec.sweep import load_study

    refuse_plan(file)
    studied = load_study(file)
    folder = out or Path(studied.study.launch.run_dir).expanduser() / file.stem
    check(studied)
    make_folder(folder)
    try:
        with only_experiment(folder):
            outcome = _planned(studied, folder, jobs or usable_cores())
            measure = studied.study.measure if launch is None else ("all" if launch else "none")
            if measure != "none":
                outcome = _launched(studied, outcome, measure)
    except KeyboardInterrupt:
        told = f"Stopped; what is done is kept in {folder}. Run the same again to go on."
        Console(stderr=True).print(told, highlight=False, markup=False, soft_wrap=True)
        raise ToldInterrupt from None
    _show(outcome, as_json)


def _planned(studied: Studied, folder: Path, jobs: int) -> StudyOutcome:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from bigplan.experiment.running import plan_all

    console = Console(stderr=True)
    columns = (TextColumn("Planning"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        return plan_all(
            studied,
            folder,
            jobs,
            lambda done, total: progress.update(task, completed=done, total=total),
        )


def _launched(
    studied: Studied, outcome: StudyOutcome, measure: Literal["none", "all"] | int
) -> StudyOutcome:
    require_linux("experiment run --launch")
    from bigplan.launcher.session import require_packages

    require_packages()
    from bigplan.experiment.launching import launch_all

    return launch_all(outcome, measure, studied.study.launch, Console(stderr=True))


@experiment.command()
def compare(
    folder: Annotated[
        Path, typer.Argument(help="The folder of an experiment, such as runs/my-experiment.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show an experiment: predicted beside measured, error, ranks, and the Pareto table."""
    from bigplan.experiment.folder import read_index
    from bigplan.experiment.running import read_outcome

    require_there(folder, "the folder of an experiment, such as runs/my-experiment")
    if is_file(folder):
        raise InputError(f"{folder} is a file; name the folder that `bigplan experiment run` wrote")
    _show(read_outcome(folder, read_index(folder)), as_json, compared=True)


def _show(outcome: StudyOutcome, as_json: bool, *, compared: bool = False) -> None:
    from bigplan.experiment.shown import accuracy_text, outcome_report

    if as_json:
        print_json(outcome_json(outcome))
        return
    console = Console()
    console.print(outcome_report(outcome))
    if compared or outcome.measured:
        console.print(accuracy_text(outcome), highlight=False)
    console.print(f"Results in {outcome.folder}", highlight=False, markup=False)


def outcome_json(outcome: StudyOutcome) -> dict[str, object]:
    """Every row with its swept keys; `pareto` has the numbers of points that no other dominates."""
    from bigplan.experiment.pareto import front
    from bigplan.experiment.shown import best_point

    points = [
        {"point": n, "sweep": entry.values, **row.model_dump(mode="json")}
        | (
            {"measured": outcome.measured[n].model_dump(mode="json")}
            if n in outcome.measured
            else {}
        )
        for n, (entry, row) in enumerate(zip(outcome.index.points, outcome.rows, strict=True))
    ]
    return {"best": best_point(outcome), "pareto": list(front(outcome.rows)), "points": points}
