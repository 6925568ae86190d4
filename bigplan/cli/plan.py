"""`bigplan plan` and `bigplan simulate`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bigplan.cli.options import ExperimentOptions, experiment_of, takes
from bigplan.errors import InputError
from bigplan.plan import Plan
from bigplan.spec.experiment import Experiment

JSON_OUTPUT = typer.Option("--json", help="Print one JSON object and nothing else on stdout.")


@takes(ExperimentOptions)
def plan(
    options: ExperimentOptions,
    experiment: Annotated[
        Path | None, typer.Argument(help="Experiment YAML; options win over its keys.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Try every placement: small problems only.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the plan to this file.")] = None,
    as_json: Annotated[bool, JSON_OUTPUT] = False,
) -> None:
    """Find the fastest way to train a model on a cluster. Needs no GPU.

    Exit codes: 0 planned, 2 bad input, 3 nothing fits.
    """
    wanted = experiment_of(experiment, options)
    if out is not None and not out.parent.is_dir():  # said before the search, not after it
        raise InputError(f"--out {out}: the folder {out.parent} does not exist; create it first")
    made, seconds = plan_experiment(wanted, exact=exact)
    if out is not None:
        from bigplan.plan import save_plan

        save_plan(made, out)
    if as_json:
        from bigplan.report.plan_json import plan_json

        print(json.dumps(plan_json(made, seconds), indent=2))
        return
    from bigplan.report.plan_report import plan_report

    console = Console()
    console.print(plan_report(made, seconds))
    if out is not None:
        console.print(f"Plan written to {out}", highlight=False)


def plan_experiment(experiment: Experiment, *, exact: bool = False) -> tuple[Plan, float]:
    """The plan and the seconds its search took. Raises BigplanError."""
    model, cluster = experiment.model_spec(), experiment.cluster_spec()
    training = experiment.resolved_training()
    from bigplan.planner import Request, make_plan

    request = Request(model, training, cluster, experiment.set, experiment.engine, exact)
    start = time.perf_counter()
    with Console(stderr=True).status(f"Planning {model.name} on {cluster.gpus} devices ..."):
        made = make_plan(request)
    return made, time.perf_counter() - start


def simulate(
    plan: Annotated[Path, typer.Argument(help="A plan written by `bigplan plan --out`.")],
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace for ui.perfetto.dev.")
    ] = None,
    as_json: Annotated[bool, JSON_OUTPUT] = False,
) -> None:
    """Play a plan's steady step again: its time, and how busy each resource is."""
    from bigplan.plan import load_plan
    from bigplan.planner import simulate_plan
    from bigplan.report.plan_json import timeline_json
    from bigplan.report.plan_report import timeline_report

    timeline = simulate_plan(load_plan(plan))
    if trace is not None:
        try:
            trace.write_text(json.dumps(timeline.to_chrome()))
        except OSError as error:
            raise InputError(f"cannot write the trace to {trace}: {error.strerror}") from None
    if as_json:
        print(json.dumps(timeline_json(timeline), indent=2))
        return
    console = Console()
    console.print(timeline_report(timeline))
    if trace is not None:
        console.print(f"Trace written to {trace}; open it at ui.perfetto.dev", highlight=False)
