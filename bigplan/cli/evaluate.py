"""`bigplan evaluate`."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.inputs import checked_plan, require_there
from bigplan.cli.interrupts import ended_by
from bigplan.errors import InputError
from bigplan.spec.files.document import validate
from bigplan.spec.schedule import MOST_STEPS
from bigplan.spec.training import Training, ValidationSpec
from bigplan.system import require_linux

if TYPE_CHECKING:
    from bigplan.launcher.evaluation import Evaluation


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")],
    data: Annotated[
        str | None,
        typer.Option(
            "--data", help="Prepared folder or text file; default: the run's validation data."
        ),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(
            "--batches",
            help="Global batches of it at most; default: all, of the run's validation data as many "
            "as the run used.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell the loss of a run's newest checkpoint on held-out data, by the run's own plan.

    It is what `training.validation` tells between steps: the mean loss of a token with its
    perplexity, of a run that learns from pairs (DPO, ORPO, SimPO) the mean loss of a pair and how
    many are told apart rightly. It runs where the run did, and leaves its record as it is.
    Exit codes: 0, 2 bad input or refused, 4 this machine has less than the plan promises, 5 a
    worker failed, 6 the newest checkpoint is damaged, 130 interrupted.
    """
    require_linux("evaluate")
    console = Console(stderr=True)
    with ended_by(signal.SIGINT):
        from bigplan.launcher import evaluation
        from bigplan.launcher.inputs import require_inputs
        from bigplan.launcher.record import PLAN
        from bigplan.launcher.resume import read_resumable
        from bigplan.launcher.session import require_packages

        require_packages()
        folder = run.expanduser()
        require_there(folder, "the folder of a run, such as runs/my-model-1")
        found = read_resumable(folder)
        plan = checked_plan(folder / PLAN, found.plan)
        plan = evaluation.evaluating(plan, _wanted(plan.training, data, batches))
        if found.how.address in (None, "local"):
            require_inputs(plan.model, plan.training, weights=False)
    told = evaluation.evaluate(replace(found, plan=plan), console)
    if as_json:
        print_json({"run": str(folder), **_as_object(told)})
    else:
        print(_sentence(told))


def _wanted(training: Training, data: str | None, batches: int | None) -> ValidationSpec:
    """What the options and, where they are silent, the run say. Raises InputError."""
    before = training.validation
    if data is None and before is None:
        raise InputError("this run has no validation data; name some with --data FOLDER")
    given: dict[str, object] = {"batches": MOST_STEPS}
    if data is None and before is not None:
        given = before.model_dump()
    given |= {"data": data} if data is not None else {}
    given |= {"batches": batches} if batches is not None else {}
    return validate(given, ValidationSpec, "command line")


def _as_object(told: Evaluation) -> dict[str, object]:
    rewards = None if told.rewards is None else dict(told.rewards)
    loss = {
        "loss": told.loss if math.isfinite(told.loss) else None,
        "perplexity": told.perplexity,
        "rewards": rewards,
    }
    return {"step": told.step, "data": told.data, **loss}


def _sentence(told: Evaluation) -> str:
    named = dict(told.rewards or {})
    if told.perplexity is not None:
        named["perplexity"] = told.perplexity
    beside = "".join(f", {name} {value:.5g}" for name, value in named.items())
    return f"After step {told.step}, on {told.data}: loss {told.loss:.4f}{beside}"
