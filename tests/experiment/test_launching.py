"""Points launched one after another, stopped and gone on with: the launcher runs, Ray does not."""

import csv
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from bigplan.errors import PreflightError
from bigplan.experiment import launching
from bigplan.experiment.launching import chosen, launch_all
from bigplan.experiment.running import StudyOutcome, plan_all
from bigplan.launcher.driver import launch
from bigplan.launcher.record import read_record
from bigplan.runtime.result import StepResult
from bigplan.spec.experiment import LaunchSpec
from tests.experiment.rows import index, row
from tests.experiment.studies import study, unseen
from tests.launcher.fakes import Fake, quiet, without_ray

__all__ = ["without_ray"]
pytestmark = pytest.mark.usefixtures("without_ray")


class Interrupted(Fake):
    """Ctrl-C during step 2."""

    def step(self, checkpoint: Path | None = None) -> StepResult:
        if self.steps == 1 and self.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(checkpoint)


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Fake]], list[str]]:
    """Launches by such workers; run folders in the order of launches."""

    def launched_by(worker: type[Fake]) -> list[str]:
        folders: list[str] = []

        def launched(plan: object, options: object, console: object) -> Path:
            run = launch(plan, options, console, worker)  # type: ignore[arg-type] # as they come
            folders.append(run.parent.name)
            return run

        monkeypatch.setattr(launching, "launch", launched)
        return folders

    return launched_by


def planned(folder: Path) -> StudyOutcome:
    return plan_all(study(folder), folder / "out", 0, unseen)


def test_launches_are_measured_and_not_repeated(
    tmp_path: Path, by: Callable[[type[Fake]], list[str]]
) -> None:
    outcome, how = planned(tmp_path), LaunchSpec(checkpoint_keep=0, tensorboard=False)
    runs = by(Fake)
    before = (tmp_path / "out/results.csv").read_bytes()
    outcome = launch_all(outcome, "all", how, quiet())
    assert runs == [entry.key for entry in outcome.index.points[:2]], "the third has no plan"
    assert sorted(outcome.measured) == [0, 1]
    measured = outcome.measured[1]
    record = read_record(tmp_path / "out" / measured.run)
    assert measured.step_seconds == record.summary.measured_step_seconds
    assert (measured.steps, measured.loss, measured.gpu_bytes) == (3, 2.0, 11)
    with (tmp_path / "out/measured.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["point"] for line in lines] == ["0", "1"]
    assert float(lines[0]["predicted_step_seconds"]) == outcome.rows[0].step_seconds
    assert (tmp_path / "out/results.csv").read_bytes() == before, "no clock in it"
    again = launch_all(outcome, "all", how, quiet())
    assert len(runs) == 2
    assert again.measured == outcome.measured


def test_a_launch_that_fails_is_told_and_tried_again_next_time(
    tmp_path: Path, by: Callable[[type[Fake]], list[str]]
) -> None:
    outcome, how = planned(tmp_path), LaunchSpec(checkpoint_keep=0, tensorboard=False)

    class Short(Fake):
        def preflight(self) -> None:
            raise PreflightError("this machine has less memory than the plan promises")

    by(Short)
    failed = launch_all(outcome, 1, how, quiet())
    (number,) = failed.measured
    assert "less memory" in failed.measured[number].reason
    by(Fake)
    mended = launch_all(failed, 1, how, quiet())
    assert mended.measured[number].reason == ""
    assert mended.measured[number].steps == 3


def test_ctrl_c_in_a_launch_goes_on_from_its_checkpoint(
    tmp_path: Path, by: Callable[[type[Fake]], list[str]]
) -> None:
    outcome, how = planned(tmp_path), LaunchSpec(tensorboard=False)
    by(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch_all(outcome, "all", how, quiet())
    runs = by(Fake)
    done = launch_all(outcome, "all", how, quiet())
    assert runs == [entry.key for entry in outcome.index.points[:2]]
    record = read_record(tmp_path / "out" / done.measured[0].run)
    assert record.summary.resumed == (2,)
    assert [metric.step for metric in record.metrics] == [1, 2, 3]


def test_the_fastest_that_run_here() -> None:
    rows = (row(1.0), row(3.0), row(2.0), row(9.0, runs=False), row(9.0, engine=None))
    points = index({"n": 0}, {"n": 1}, {"n": 2}, {"n": 3}, {"n": 4})
    outcome = StudyOutcome(Path(), points, rows, {})
    assert chosen(outcome, "none") == ()
    assert chosen(outcome, "all") == (0, 1, 2)
    assert chosen(outcome, 2) == (1, 2)
