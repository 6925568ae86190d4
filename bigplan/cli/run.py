"""`bigplan launch`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.clean import offer
from bigplan.cli.given import experiment_of, plan_options_given, run_options_given
from bigplan.cli.inputs import checked_plan, is_plan, require_there
from bigplan.cli.interrupts import ended_by
from bigplan.cli.options import ExperimentOptions
from bigplan.cli.plan import plan_experiment
from bigplan.cli.spread import takes
from bigplan.errors import InputError
from bigplan.launcher.inputs import require_inputs
from bigplan.plan import Plan
from bigplan.spec.experiment import Experiment, LaunchSpec
from bigplan.spec.files.document import validate
from bigplan.system import require_linux
from bigplan.units import format_bytes

if TYPE_CHECKING:
    from bigplan.launcher.record import Asked
    from bigplan.launcher.resume import Resumable

A_RUN = "the folder of a run, such as runs/my-model-1"


@takes(ExperimentOptions)
def launch(
    options: ExperimentOptions,
    what: Annotated[
        Path | None,
        typer.Argument(help="A plan, or an experiment to plan first.", metavar="[PLAN|EXPERIMENT]"),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            help="Go on with the run in this folder from its newest checkpoint, with its own plan "
            "or with another one: named, or made anew where options change it.",
            metavar="RUN",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a plan through Ray, then show measured beside predicted.

    An experiment is planned first, for what can be executed here unless it says otherwise.
    Ctrl-C finishes the running step, writes a checkpoint and stops; a second one stops at once.
    On a Ray cluster every node needs the extra `launch`, the data and an --interface to listen on.
    Exit codes: 0, 2 bad input or refused, 3 nothing fits, 4 this machine has less than the plan
    promises, 5 a worker failed, 6 a checkpoint is damaged or cannot be written, 130 interrupted.
    """
    console = Console(stderr=as_json)
    require_linux("launch")
    with ended_by(signal.SIGINT):
        from bigplan.launcher import driver
        from bigplan.launcher.record import read_record
        from bigplan.launcher.resume import read_resumable
        from bigplan.launcher.session import require_packages
        from bigplan.report.run_report import run_json, run_report

        require_packages()
        validate(run_options_given(options), LaunchSpec, "command line")
        if resume is not None:
            require_there(resume.expanduser(), A_RUN)
        run = None if resume is None else read_resumable(resume.expanduser())
        if run is not None and options.run_dir is not None:
            raise InputError(f"--run-dir: a resumed run stays in its folder, {run.folder}")
        plan, how, asked = _wanted(what, options, run, console)
        if how.address in (None, "local"):
            _look_at_inputs(plan, console, weights=run is None)
        offer(console)
    record = read_record(driver.launch(plan, driver.LaunchOptions(how, run, asked), console))
    if as_json:
        print_json(run_json(record))
    else:
        console.print(run_report(record))


def _look_at_inputs(plan: Plan, console: Console, *, weights: bool) -> None:
    note = require_inputs(plan.model, plan.training, weights=weights)
    if note:
        console.print(note, markup=False)


def _wanted(
    what: Path | None, options: ExperimentOptions, run: Resumable | None, console: Console
) -> tuple[Plan, LaunchSpec, Asked | None]:
    """The plan to run and how: as the run did that goes on, as the file says, as options say.

    With it what the plan was asked for with; None: only the plan knows.
    """
    from bigplan.launcher.record import PLAN, Asked, require_place
    from bigplan.launcher.resume import refuse_done, refuse_other_training, refuse_without_rate

    asked: Asked | None = None
    how = {} if run is None else run.how.model_dump()
    given, changed = plan_options_given(options), run_options_given(options)
    if what is not None and is_plan(what):
        if given:
            names = ", ".join(given)
            raise InputError(
                f"{what} is a plan: its decisions are made, so {names} cannot change any more; "
                "launch the experiment instead, or leave the option out"
            )
        plan = checked_plan(what)
    elif what is None and run is not None and not given:
        plan, asked = checked_plan(run.folder / PLAN, run.plan), run.asked
    else:
        experiment = _experiment(what, options, run)
        if what is not None and experiment.training.steps is not None:  # else the run's own
            how["steps"] = experiment.training.steps
        how |= experiment.launch.model_dump(include=experiment.launch.model_fields_set)
        model, training = experiment.model_spec(), experiment.resolved_training()
        launched = validate(how | changed, LaunchSpec, "command line")
        # The driver asks again, but a search may take minutes.
        if run is None:
            require_place(Path(launched.run_dir).expanduser().absolute())
        else:
            target = launched.steps or training.steps
            refuse_other_training(run.plan, model, training)
            refuse_done(run.folder, target)
            refuse_without_rate(training, target)
        if launched.address in (None, "local"):
            require_inputs(model, training, weights=run is None)
        plan = _planned(experiment, console)
        nodes = plan.cluster.nodes
        asked = Asked(set=experiment.set, engine=experiment.engine, nodes=nodes)
    return plan, validate(how | changed, LaunchSpec, "command line"), asked


def _experiment(path: Path | None, options: ExperimentOptions, run: Resumable | None) -> Experiment:
    if path is not None or run is None:
        return experiment_of(path, options)
    parts = ("model", "training", "cluster")
    base = {name: getattr(run.plan, name).model_dump(mode="json") for name in parts}
    base["engine"] = run.plan.engine
    experiment = experiment_of(None, options, base)
    if options.cluster is None:
        _check_caps(experiment, run.plan)
    return experiment


def _check_caps(experiment: Experiment, before: Plan) -> None:
    """Raise InputError where a cap would lift an older one: the plan knows no larger machine."""
    group = before.cluster.group
    drives = group.nvme
    have = {
        "gpu": group.gpu.memory,
        "host": group.host.memory,
        "nvme": drives.capacity * drives.drives if drives else 0,
    }
    for tier, size in experiment.caps.items():
        if size > have[tier]:
            raise InputError(
                f"--cap {tier}={format_bytes(size)} is more than the {format_bytes(have[tier])} "
                "that the run's plan was made for; name the whole machine too, with --cluster"
            )


def _planned(experiment: Experiment, console: Console) -> Plan:
    plan = plan_experiment(experiment, keeps_best=False).plan
    from bigplan.report.decision import decision
    from bigplan.report.stages import stages_of

    console.print(decision(plan, stages_of(plan)), highlight=False)
    return plan
