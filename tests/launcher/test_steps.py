"""The steps of a launch with the native runtime's worker, without Ray."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from bigplan.data.prepare import Preparation, prepare
from bigplan.data.sources import Fields
from bigplan.errors import DivergedError
from bigplan.launcher.checkpoints import FOLDER, Pace, checkpoints, step_of
from bigplan.launcher.journal import Journal
from bigplan.launcher.record import Metric, read_metrics, read_summary
from bigplan.launcher.skipped import idle_since, told
from bigplan.launcher.steps import Steps
from bigplan.placement import Tier
from bigplan.runtime.result import Finished, StepResult
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.optimizer import Optimizer
from bigplan.timeline import Timeline
from tests.data.texts import write_pairs
from tests.runtime.checkpoints import resident, running
from tests.runtime.execution.test_update import _inject
from tests.tiny import tiny_plan


class Alone:
    """One rank, in this process."""

    def __init__(self, worker: NativeWorker) -> None:
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


@pytest.mark.parametrize(("most", "target", "ended"), [(3, 30, 3), (10, 2, 2), (0, 4, 4)])
def test_a_run_that_learns_nothing_ends_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, target: int, ended: int
) -> None:
    _inject(monkeypatch, dict.fromkeys(range(30), math.nan), layer=1)
    plan = resident(clip_norm=1.0, precision="fp32")
    with running(plan) as (worker, done):
        journal = Journal(plan, tmp_path, target, tensorboard=False)
        journal.start(done)
        steps = Steps(Alone(worker), journal, 0, Pace(0), lambda: False, most)
        where = rf"in {ended} step\(s\) in a row, those of layer 1 \(block\) alone, .*--max-skipped"
        with pytest.raises(DivergedError, match=where):
            steps.run(Quiet())
    assert journal.done == ended
    assert [metric.not_finite for metric in read_metrics(tmp_path)] == [(1,)] * ended


def test_one_bad_step_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _inject(monkeypatch, {1: math.inf}, layer=1)
    plan = resident(clip_norm=1.0, precision="fp32")
    with running(plan) as (worker, done):
        journal = Journal(plan, tmp_path, 3, tensorboard=False)
        journal.start(done)
        Steps(Alone(worker), journal, 0, Pace(0), lambda: False, 2).run(Quiet())
    assert [metric.skipped for metric in read_metrics(tmp_path)] == [False, True, False]


def test_a_run_takes_the_seconds_of_its_steps_whatever_was_lost_and_resumed(
    tmp_path: Path,
) -> None:
    def run(journal: Journal, done: int, *seconds: float) -> None:
        journal.start(done)
        for each in seconds:
            took = StepResult(journal.done + 1, 1.0, each, Timeline((), each))
            journal.record([took], None, None)

    plan = tiny_plan()
    first = Journal(plan, tmp_path, 3, tensorboard=False)
    run(first, 0, 8.0, 4.0)
    run(first, 1, 2.0)  # a rank was lost in the third step
    first.close("interrupted")
    assert read_summary(tmp_path).seconds == 10.0
    second = Journal(plan, tmp_path, 3, tensorboard=False)
    run(second, 2, 1.0)
    second.finished = [Finished({Tier.NVME: 0}, (), "")]
    second.close("finished")
    summary = read_summary(tmp_path)
    assert summary.seconds == 11.0
    measured = {row.tier: row.measured for row in summary.memory}
    assert measured == {"gpu": None, "host": None, "nvme": 0}  # of what no rank can tell


@pytest.mark.parametrize(("scales", "idle"), [((4.0, 2.0), 0), ((2.0, 1.0, 1.0), 2)])
def test_steps_in_which_the_scale_falls_do_not_count(scales: tuple[float, ...], idle: int) -> None:
    metrics = [
        Metric(step=step, seconds=1.0, tokens_per_second=1.0, skipped=True, loss_scale=scale)
        for step, scale in enumerate(scales, start=1)
    ]
    assert idle_since(metrics) == idle
    assert "train in bf16" in told(metrics[-1], idle, ("embedding", "head"))


def test_a_step_of_prompts_alone_has_no_loss_and_is_no_end(tmp_path: Path) -> None:
    texts = write_pairs(tmp_path / "pairs.jsonl", [("long " * 400, "short"), ("long " * 400, "")])
    fields = Fields(prompt="prompt", response="response")
    prepare(Preparation((texts,), fields), tmp_path / "data")
    plan = resident(data=str(tmp_path / "data"), clip_norm=None)
    with running(plan) as (worker, done):
        journal = Journal(plan, tmp_path, 12, tensorboard=False)
        journal.start(done)
        Steps(Alone(worker), journal, 0, Pace(0), lambda: False).run(Quiet())
    found = read_metrics(tmp_path)
    assert {metric.uncounted for metric in found} == {True, False}
    assert all((metric.loss is None) == metric.uncounted for metric in found)
    assert {metric.loss_text for metric in found if metric.uncounted} == {"of no token"}
