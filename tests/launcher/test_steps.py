"""The steps of a launch with the native runtime's worker, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from bigplan.errors import DivergedError
from bigplan.launcher.checkpoints import FOLDER, Pace, checkpoints, step_of
from bigplan.launcher.journal import Journal
from bigplan.launcher.record import Metric
from bigplan.launcher.steps import Steps
from bigplan.runtime.worker import Worker
from bigplan.spec.optimizer import Optimizer
from tests.runtime.checkpoints import resident, running


class Alone:
    """One rank, in this process."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def ask(self, method: str, *arguments: object, doing: str) -> list[Any]:
        return [getattr(self.worker, method)(*arguments)]


class Quiet:
    """Shows nothing."""

    def step(self, metric: Metric) -> None:
        pass

    def say(self, text: str) -> None:
        pass


def test_without_clipping_weights_that_gave_no_finite_loss_are_no_checkpoint(
    tmp_path: Path,
) -> None:
    """The worker leaves it to the steps, which know what is on the disk."""
    far = Optimizer(name="sgd", learning_rate=1e6, momentum=0.0)
    plan = resident(clip_norm=None, optimizer=far)
    (tmp_path / FOLDER).mkdir()
    with running(plan) as (worker, done):
        journal = Journal(plan, tmp_path, 30, tensorboard=False)
        journal.start(done)
        steps = Steps(Alone(worker), journal, 5, Pace(1), lambda: False)
        with pytest.raises(DivergedError, match=r"loss of step (\d+) is not a finite number"):
            steps.run(Quiet())
    assert journal.done >= 2
    kept = [step_of(path) for path in checkpoints(tmp_path)]
    assert kept == list(range(1, journal.done - 1))
