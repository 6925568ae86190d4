"""A run's newest checkpoint on held-out data: what validation does between steps, without steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bigplan.engines import engine_of
from bigplan.errors import InputError
from bigplan.interrupted import ToldInterrupt
from bigplan.launcher import driver
from bigplan.launcher.actor import WorkerType
from bigplan.launcher.checkpoints import checkpoints, newest_step
from bigplan.launcher.journal import Journal
from bigplan.launcher.launched import Launched
from bigplan.launcher.leftovers import listed
from bigplan.launcher.lock import only_launch
from bigplan.launcher.placing import Layout, require_gpus
from bigplan.launcher.progress import Promise, progress
from bigplan.launcher.record import Asked
from bigplan.launcher.references import References
from bigplan.launcher.resume import Resumable, resume_hint, shown
from bigplan.launcher.steps import validated
from bigplan.plan import Plan, digest
from bigplan.spec.training import ValidationSpec
from bigplan.units import counted

if TYPE_CHECKING:
    from bigplan.runtime.result import Evaluated

MOST = 700.0  # a loss whose perplexity is still a number


@dataclass(frozen=True)
class Evaluation:
    """What the weights after `step` steps are worth on `data`."""

    step: int
    data: str
    loss: float
    rewards: Mapping[str, float] | None
    """of pairs of responses; None: the next token is learned"""

    @property
    def perplexity(self) -> float | None:
        """E to the mean loss of a token; None of pairs, and where no number is large enough."""
        far = not self.loss < MOST
        return None if self.rewards is not None or far else math.exp(self.loss)


def evaluating(plan: Plan, validation: ValidationSpec) -> Plan:
    """The run's plan with other validation, which enters nothing that a step computes."""
    training = plan.training.model_copy(update={"validation": validation})
    inputs = {**plan.inputs, "training": digest(training)}
    return plan.model_copy(update={"training": training, "inputs": inputs})


def evaluate(run: Resumable, console: Console, worker: WorkerType | None = None) -> Evaluation:
    """Evaluate the newest checkpoint by the run's plan, whose validation says on what.

    The run's record stays as it is. `worker` replaces the engine's. Raises BigplanError, among them
    CheckpointError where the newest checkpoint is damaged, and KeyboardInterrupt.
    """
    plan, folder = run.plan, run.folder.absolute()
    wanted = plan.training.validation
    assert wanted is not None, "the plan says what is evaluated on"
    step = newest_step(folder)
    if step is None:
        raise InputError(f"{shown(folder)} cannot be evaluated. {resume_hint(folder)}")
    engine = engine_of(plan)
    driver.refuse_unlaunchable(plan, engine)
    journal = Journal(plan, folder, step, tensorboard=False)
    asked = run.asked or Asked(engine=plan.engine, nodes=plan.cluster.nodes)
    launched = Launched(plan, run.how, journal, console, worker, asked)
    found: list[Evaluated] = []
    with (
        _stopping(launched),
        only_launch(folder),
        listed(*astuple(launched.folders)) as launched.listed,
        launched.stop,
    ):
        driver.clear_away(launched.folders)
        if launched.address is None:
            require_gpus(Layout.of(plan))
        ranks = counted(plan.strategy.ranks, "rank")
        launched.say(f"Evaluating {plan.model.name} after step {step} on {wanted.data}, on {ranks}")
        driver.prepare_engine(launched, engine)
        driver.with_ray(launched, partial(_evaluate, checkpoints(folder)[-1], found))
    return Evaluation(step, wanted.data, found[0].loss, found[0].rewards)


@contextmanager
def _stopping(launched: Launched) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        launched.say("Stopped; the run is as it was before")
        raise ToldInterrupt from None


def _evaluate(checkpoint: Path, found: list[Evaluated], launched: Launched) -> None:
    plan, folder = launched.plan, launched.journal.folder
    with driver.crew_of(launched) as crew:
        done = driver.start_crew(launched, crew, checkpoint)
        wanted = plan.training.preference
        if wanted is not None and wanted.refers:
            with progress(launched.console, done, done, Promise.of(plan)) as show:
                References(crew, folder, done).give(show, lambda: False)
        found.append(validated(crew, plan, "evaluating"))
        crew.ask("close", doing="closing")
