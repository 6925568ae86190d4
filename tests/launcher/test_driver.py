"""Launches without Ray: checkpoints, stopping, resuming, and runs that go wrong."""

import math
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bigplan.errors import (
    CheckpointError,
    DivergedError,
    InputError,
    LostError,
    PreflightError,
    RefusedError,
    WorkerError,
)
from bigplan.launcher.checkpoints import checkpoints, newest_step, step_of
from bigplan.launcher.driver import LaunchOptions, launch
from bigplan.launcher.lock import only_launch
from bigplan.launcher.record import (
    Record,
    read_launch,
    read_record,
    read_summary,
    write_summary,
)
from bigplan.launcher.resume import read_resumable
from bigplan.plan import Plan
from bigplan.report.run_report import headline_lines, run_json, run_report
from bigplan.runtime.result import Finished, Saved, StepResult
from bigplan.spec.schedule import Schedule
from bigplan.spec.training import ValidationSpec
from tests.launcher.fakes import Fake, plan_with, quiet, told, without_ray
from tests.tiny import tiny_plan
from tests.wording import tells

__all__ = ["without_ray"]
pytestmark = pytest.mark.usefixtures("without_ray")


def again(folder: Path, **how: object) -> LaunchOptions:
    run = read_resumable(folder)
    return LaunchOptions(run.how.model_copy(update=how), run)


def kept(folder: Path) -> list[int]:
    return [step_of(path) for path in checkpoints(folder)]


def steps(record: Record) -> list[int]:
    return [metric.step for metric in record.metrics]


class Interrupted(Fake):
    """Ctrl-C during step 5."""

    def step(self, checkpoint: Path | None = None) -> StepResult:
        if self.steps == 4 and self.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(checkpoint)


class LeftAlone(Fake):
    """The terminal closes during step 5."""

    def step(self, checkpoint: Path | None = None) -> StepResult:
        if self.steps == 4 and self.rank == 0:
            os.kill(os.getpid(), signal.SIGHUP)
        return super().step(checkpoint)


class Impatient(Fake):
    """Ctrl-C twice during step 5."""

    def step(self, checkpoint: Path | None = None) -> StepResult:
        if self.steps == 4 and self.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(checkpoint)


class Dead(Fake):
    """Ends in step 6, as a lost process does."""

    def step(self, checkpoint: Path | None = None) -> StepResult:
        if self.steps == 5:
            raise WorkerError("rank 0 died while running step 6")
        return super().step(checkpoint)


def died(folder: Path, plan: Plan | None = None, **how: object) -> Path:
    """A run of ten steps that died in the sixth."""
    how = {"steps": 10, "checkpoint_every": 2, **how}
    with pytest.raises(WorkerError):
        launch(plan or tiny_plan(), told(folder, **how), quiet(), Dead)
    return folder / "tiny-llama-test-1"


def test_checkpoints_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    how = told(tmp_path, steps=7, checkpoint_every=2, checkpoint_keep=3)
    record = read_record(launch(tiny_plan(), how, quiet(), Fake))
    assert kept(record.folder) == [4, 6, 7]
    # Updates wait for the next step, so a state is written beside the step after it.
    assert [metric.checkpoint for metric in record.metrics] == [None, None, 2, None, 4, None, 6]
    assert (record.summary.checkpoint, record.summary.target_steps) == (7, 7)


def test_without_clipping_a_state_is_written_in_its_own_step(tmp_path: Path) -> None:
    how = told(tmp_path, steps=6, checkpoint_every=2)
    record = read_record(launch(plan_with(clip_norm=None), how, quiet(), Fake))
    assert [metric.checkpoint for metric in record.metrics] == [None, 2, None, 4, None, None]
    assert kept(record.folder) == [4, 6]


@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ({}, [3]),
        ({"checkpoint_every": 0}, [3]),
        ({"checkpoint_keep": 0, "checkpoint_every": 1}, []),
        ({"checkpoint_keep": 1, "checkpoint_every": 1}, [3]),
    ],
)
def test_fewer_checkpoints(tmp_path: Path, how: dict[str, int], steps: list[int]) -> None:
    assert kept(launch(tiny_plan(), told(tmp_path, **how), quiet(), Fake)) == steps


def test_metrics_say_what_the_ranks_measured(tmp_path: Path) -> None:
    plan = tiny_plan()
    metric = read_record(launch(plan, told(tmp_path), quiet(), Fake)).metrics[1]
    assert (metric.learning_rate, metric.gradient_norm, metric.loss_scale) == (1e-3, 2.0, None)
    assert metric.data_seconds == 1.25  # of the slowest rank
    assert metric.memory == {"gpu": 11, "host": 200}  # the worst GPU, both ranks of the node
    assert metric.mfu == pytest.approx(plan.predicted.mfu * plan.predicted.step_seconds / 2.0)


def test_validation_at_intervals_and_after_the_last_step(tmp_path: Path) -> None:
    plan = plan_with(validation=ValidationSpec(data="bundled", every=2, batches=1))
    record = read_record(launch(plan, told(tmp_path, steps=5), quiet(), Fake))
    assert [metric.validation_loss for metric in record.metrics] == [None, 5.0, None, 3.0, 2.0]


def test_ctrl_c_ends_the_step_writes_a_checkpoint_and_resumes(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)  # a shell's background job ignores it
    with pytest.raises(KeyboardInterrupt):
        launch(tiny_plan(), told(tmp_path, steps=9), quiet(), Interrupted)
    folder = tmp_path / "tiny-llama-test-1"
    record = read_record(folder)
    assert (record.summary.status, record.summary.steps, kept(folder)) == ("interrupted", 5, [5])
    assert signal.getsignal(signal.SIGINT) is before
    record = read_record(launch(tiny_plan(), again(folder), quiet(), Fake))
    assert (record.summary.status, record.summary.resumed) == ("finished", (5,))
    assert steps(record) == list(range(1, 10))
    assert kept(folder) == [5, 9]


def test_a_terminal_that_closes_leaves_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        launch(tiny_plan(), told(tmp_path, steps=9), quiet(), LeftAlone)
    record = read_record(tmp_path / "tiny-llama-test-1")
    assert (record.summary.status, kept(record.folder)) == ("interrupted", [5])


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        launch(tiny_plan(), told(tmp_path, steps=9, checkpoint_every=2), quiet(), Impatient)
    folder = tmp_path / "tiny-llama-test-1"
    record = read_record(folder)
    assert (record.summary.status, record.summary.steps, kept(folder)) == ("interrupted", 4, [2])


class Lost(Fake):
    """Its process ends in some calls, by how many there were of step() before."""

    calls = 0
    fatal: frozenset[int] = frozenset()

    def step(self, checkpoint: Path | None = None) -> StepResult:
        if self.rank == 0:
            Lost.calls += 1
            if Lost.calls in Lost.fatal:
                raise LostError(f"rank 0 died while running step {self.steps + 1}")
        return super().step(checkpoint)


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say in which calls of step() a rank is lost."""

    def set_fatal(*calls: int) -> None:
        monkeypatch.setattr(Lost, "calls", 0)
        monkeypatch.setattr(Lost, "fatal", frozenset(calls))

    return set_fatal


def lost_run(folder: Path, **how: object) -> Record:
    """Of ten steps, a checkpoint every two."""
    options = told(folder, steps=10, checkpoint_every=2, **how)
    return read_record(launch(tiny_plan(), options, quiet(), Lost))


def test_a_lost_rank_is_replaced_and_the_curve_is_the_same(
    tmp_path: Path, losing: Callable[..., None]
) -> None:
    """Step 6 is lost twice, once just after a start; then steps are gained, and step 9 is lost."""
    losing(6, 7, 12)
    record = lost_run(tmp_path)
    assert steps(record) == list(range(1, 11))
    assert [metric.loss for metric in record.metrics] == [5.0 - step for step in range(1, 11)]
    restarts = [(lost.done, lost.back_to) for lost in record.summary.restarts]
    assert restarts == [(5, 4), (4, 4), (8, 6)]
    assert all(lost.seconds > 0 for lost in record.summary.restarts)
    assert record.summary.status == "finished"
    assert kept(record.folder) == [8, 10]
    assert record.summary.effective is not None
    text = "".join(str(metric.restarts or 0) for metric in record.metrics)
    assert text == "0000223333"
    screen = Console(record=True, width=300, file=StringIO())
    screen.print(run_report(record))
    shown = screen.export_text()
    assert tells(shown, "after step 6", "2 steps", "effective")


def test_a_run_that_gains_no_step_gives_up(tmp_path: Path, losing: Callable[..., None]) -> None:
    losing(*range(3, 100))  # two steps, and no third one ever
    with pytest.raises(LostError, match=r"No checkpoint was written yet\. Start it again with"):
        lost_run(tmp_path, max_restarts=2)
    record = read_record(tmp_path / "tiny-llama-test-1")
    assert Lost.calls == 5  # the third, and two that began with the first
    assert [lost.back_to for lost in record.summary.restarts] == [0, 0]
    assert record.summary.status == "failed"


def test_steps_gained_give_back_all_tries(tmp_path: Path, losing: Callable[..., None]) -> None:
    losing(4, 8, 12, 16)  # each a new step further than the one before
    assert len(lost_run(tmp_path, max_restarts=1).summary.restarts) == 4


def test_none_is_replaced_where_nobody_wants_it(
    tmp_path: Path, losing: Callable[..., None]
) -> None:
    losing(3)
    with pytest.raises(LostError):
        lost_run(tmp_path, max_restarts=0)
    assert Lost.calls == 3


def test_a_rank_lost_after_ctrl_c_ends_the_run(
    tmp_path: Path, losing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    losing(5)
    usual = Lost.step

    def stopped(worker: Lost, checkpoint: Path | None = None) -> StepResult:
        if Lost.calls == 4 and worker.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return usual(worker, checkpoint)

    monkeypatch.setattr(Lost, "step", stopped)
    with pytest.raises(LostError, match="newest checkpoint is of step 2"):
        lost_run(tmp_path)
    assert Lost.calls == 5


def test_a_dead_worker_names_the_checkpoint_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerError, match=r"newest checkpoint is of step 4.*bigplan launch") as e:
        launch(tiny_plan(), told(tmp_path / "my runs", steps=9, checkpoint_every=2), quiet(), Dead)
    assert str(e.value).endswith("bigplan launch --resume 'my runs/tiny-llama-test-1'")


def test_steps_after_the_checkpoint_are_run_again(tmp_path: Path) -> None:
    folder = died(tmp_path)
    assert steps(read_record(folder)) == [1, 2, 3, 4, 5]
    record = read_record(launch(tiny_plan(), again(folder), quiet(), Fake))
    assert steps(record) == list(range(1, 11))
    assert [metric.loss for metric in record.metrics] == [5.0 - step for step in range(1, 11)]
    assert record.summary.resumed == (4,)


def test_a_run_without_a_checkpoint_starts_again(tmp_path: Path) -> None:
    folder = died(tmp_path, checkpoint_every=0)
    record = read_record(launch(tiny_plan(), again(folder), quiet(), Fake))
    assert (steps(record), record.summary.resumed) == (list(range(1, 11)), ())


def test_a_step_that_ended_its_checkpoint_but_not_its_record_is_run_again(tmp_path: Path) -> None:
    folder = died(tmp_path, plan_with(clip_norm=None))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    record = read_record(launch(plan_with(clip_norm=None), again(folder), quiet(), Fake))
    assert (steps(record), record.summary.resumed) == (list(range(1, 11)), (2,))


class Halfway(Fake):
    """Fails with a checkpoint on its way."""

    run = Path()

    def step(self, checkpoint: Path | None = None) -> StepResult:
        if self.steps == 2:
            (self.run / "checkpoints" / "step-000002.partial").mkdir()
            raise WorkerError("a bug")
        return super().step(checkpoint)


def test_half_a_checkpoint_does_not_outlast_its_launch(tmp_path: Path) -> None:
    Halfway.run = tmp_path / "tiny-llama-test-1"
    with pytest.raises(WorkerError):
        launch(tiny_plan(), told(tmp_path, steps=4), quiet(), Halfway)
    assert (Halfway.run / "checkpoints").exists()
    assert not list(Halfway.run.glob("**/*.partial"))


def test_what_a_kill_left_is_cleared_away(tmp_path: Path) -> None:
    folder = died(tmp_path)
    (folder / "checkpoints" / "step-000005.partial").mkdir()
    (folder / "scratch" / "rank-0").mkdir(parents=True)
    (folder / "scratch" / "rank-0" / "huge.bin").write_text("x")
    launch(tiny_plan(), again(folder), quiet(), Fake)
    assert not list(folder.glob("**/*.partial"))
    assert not (folder / "scratch").exists()


def test_a_damaged_checkpoint_is_set_aside_for_an_older_one(tmp_path: Path) -> None:
    folder = died(tmp_path)
    (folder / "checkpoints" / "step-000004" / "state").write_text("damaged")
    record = read_record(launch(tiny_plan(), again(folder), quiet(), Fake))
    assert steps(record) == list(range(1, 11))
    assert record.summary.resumed == (2,)
    assert (folder / "checkpoints" / "step-000004.damaged").is_dir()


def test_all_checkpoints_damaged(tmp_path: Path) -> None:
    folder = died(tmp_path)
    for path in checkpoints(folder):
        (path / "state").write_text("damaged")
    with pytest.raises(CheckpointError, match="step-000002 is damaged"):
        launch(tiny_plan(), again(folder), quiet(), Fake)
    assert kept(folder) == [2, 4]  # nothing is thrown away
    assert steps(read_record(folder)) == [1, 2, 3, 4, 5]


def test_a_failed_checkpoint_does_not_end_the_run(tmp_path: Path) -> None:
    class Full(Fake):
        def write(self, folder: Path) -> Saved:
            if self.steps == 4:
                return Saved(4, folder / "step-000004", 0, 0.1, "No space left on device")
            return super().write(folder)

    record = read_record(
        launch(tiny_plan(), told(tmp_path, steps=7, checkpoint_every=2), quiet(), Full)
    )
    assert [metric.checkpoint for metric in record.metrics if metric.checkpoint] == [2, 6]
    assert kept(record.folder) == [6, 7]


def test_a_last_checkpoint_that_only_the_workers_see(tmp_path: Path) -> None:
    class Elsewhere(Fake):
        def save(self, folder: Path) -> Path:
            return folder / f"step-{self.steps:06}"

    with pytest.raises(CheckpointError, match=r"all nodes share.*checkpoint is of step 2"):
        launch(tiny_plan(), told(tmp_path, checkpoint_every=2), quiet(), Elsewhere)


def test_a_loss_that_is_no_number_ends_the_run_with_the_good_checkpoints(tmp_path: Path) -> None:
    class Diverges(Fake):
        def loss(self) -> float:
            return math.nan if self.steps == 7 else 1.0

    with pytest.raises(DivergedError, match=r"loss of step 7 .*checkpoint is of step 4") as error:
        launch(tiny_plan(), told(tmp_path, steps=9, checkpoint_every=2), quiet(), Diverges)
    assert "--resume" not in str(error.value)  # it would end in the same way
    folder = tmp_path / "tiny-llama-test-1"
    assert kept(folder) == [2, 4]  # 6 holds the weights of that loss
    assert read_record(folder).metrics[-1].loss is None


def test_a_run_that_died_after_its_last_checkpoint_is_closed(tmp_path: Path) -> None:
    class Dies(Fake):
        def finish(self) -> Finished:
            raise WorkerError("rank 0 died while finishing")

    with pytest.raises(WorkerError):
        launch(tiny_plan(), told(tmp_path, steps=2), quiet(), Dies)
    folder = tmp_path / "tiny-llama-test-1"
    assert kept(folder) == [2]
    record = read_record(launch(tiny_plan(), again(folder), quiet(), Fake))
    assert (record.summary.status, steps(record), kept(folder)) == ("finished", [1, 2], [2])
    assert record.summary.digest
    with pytest.raises(InputError, match="has done 2 steps, and 2 are asked for"):
        launch(tiny_plan(), again(folder), quiet(), Fake)


def test_another_number_of_steps_is_remembered(tmp_path: Path) -> None:
    folder = launch(tiny_plan(), told(tmp_path, steps=2), quiet(), Fake)
    with pytest.raises(InputError, match="has done 2 steps, and 2 are asked for"):
        launch(tiny_plan(), again(folder), quiet(), Fake)
    launch(tiny_plan(), again(folder, steps=4), quiet(), Fake)
    assert (kept(folder), read_launch(folder).steps) == ([2, 4], 4)


DECAYS = Schedule(name="cosine")


def test_a_rate_that_decays_over_all_steps_does_so_over_those_asked_for(tmp_path: Path) -> None:
    plan = plan_with(schedule=DECAYS, steps=4)
    folder = launch(plan, told(tmp_path, steps=6), quiet(), Fake)
    assert read_record(folder).plan.training.steps == 6
    ended = r"decayed to 0 after 6; launch a new run"
    with pytest.raises(RefusedError, match=ended):
        launch(read_record(folder).plan, again(folder, steps=7), quiet(), Fake)
    early = launch(plan, told(tmp_path, steps=2), quiet(), Fake)
    assert read_record(early).plan == plan  # and can go on with the same rates
    assert steps(read_record(launch(plan, again(early, steps=4), quiet(), Fake))) == [1, 2, 3, 4]


def test_a_rate_that_decays_to_a_part_goes_on_with_it(tmp_path: Path) -> None:
    plan = plan_with(schedule=DECAYS.model_copy(update={"final_fraction": 0.1}), steps=2)
    folder = launch(plan, told(tmp_path, steps=2), quiet(), Fake)
    assert steps(read_record(launch(plan, again(folder, steps=3), quiet(), Fake))) == [1, 2, 3]


def test_another_plan_of_the_same_training_goes_on_in_the_run(tmp_path: Path) -> None:
    folder = died(tmp_path)
    record = read_record(launch(tiny_plan(1), again(folder), quiet(), Fake))
    assert (record.plan, record.summary.ranks) == (tiny_plan(1), 1)
    assert steps(record) == list(range(1, 11))
    assert (folder / "plan-until-step-000004.yaml").exists()


def test_no_step_of_another_plan_is_compared_with_a_promise(tmp_path: Path) -> None:
    folder, seen = died(tmp_path), list[Record]()

    class Reported(Fake):
        def step(self, checkpoint: Path | None = None) -> StepResult:
            seen.append(read_record(folder))
            return super().step(checkpoint)

    assert read_record(folder).measured is not None
    record = read_record(launch(tiny_plan(1), again(folder), quiet(), Reported))
    assert (seen[0].plan, seen[0].measured) == (tiny_plan(1), None)
    assert record.measured is not None


class TooSmall(Fake):
    """A machine that has less than the plan promises."""

    def preflight(self) -> None:
        raise PreflightError("the plan needs more than there is")


def test_a_plan_that_cannot_go_on_takes_no_place(tmp_path: Path) -> None:
    folder = died(tmp_path)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(PreflightError, match=r"as it was before.* step 4. Go on with"):
        launch(tiny_plan(1), again(folder, steps=12), quiet(), TooSmall)
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert steps(read_record(launch(tiny_plan(), again(folder), quiet(), Fake)))[-1] == 10


def test_another_plan_is_advised_where_one_can_be_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RefusedError, match=r"cannot be launched: .*dropout") as never:
        launch(plan_with(dropout=0.1), told(tmp_path), quiet(), Fake)
    assert "--engine native" not in str(never.value)
    monkeypatch.setattr("bigplan.engines.native.native_refusal", lambda *_: "no such split")
    with pytest.raises(RefusedError, match=r"no such split\. Plan with --engine native"):
        launch(tiny_plan(), told(tmp_path), quiet(), Fake)


def test_another_training_is_refused(tmp_path: Path) -> None:
    folder = died(tmp_path)
    with pytest.raises(RefusedError, match="with that training: seed was 0 and is 7"):
        launch(plan_with(seed=7), again(folder), quiet(), Fake)
    assert steps(read_record(folder)) == [1, 2, 3, 4, 5]


def test_a_run_in_use_is_refused(tmp_path: Path) -> None:
    folder = died(tmp_path)
    with only_launch(folder), pytest.raises(RefusedError, match="still running"):
        launch(tiny_plan(), again(folder), quiet(), Fake)


def test_a_report_tells_a_running_run_from_a_killed_one(tmp_path: Path) -> None:
    folder = launch(tiny_plan(), told(tmp_path), quiet(), Fake)
    summary = read_summary(folder).model_copy(update={"status": "running"})
    write_summary(folder, summary)  # as it is until a launch closes it
    with only_launch(folder):
        assert ", running;" in "".join(headline_lines(read_record(folder)))
    record = read_record(folder)
    assert ", killed;" in "".join(headline_lines(record))
    assert run_json(record)["state"] == "killed"


def test_too_little_disk_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 4_000_000

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage())
    every = told(tmp_path, steps=9, checkpoint_every=2)
    with pytest.raises(
        PreflightError, match=r"1\.222 MiB each, 4 more at once.*--checkpoint-keep 1"
    ):
        launch(tiny_plan(), every, quiet(), Fake)
    Usage.free = 1_500_000  # for three, as where one is kept, it is too little
    with pytest.raises(PreflightError, match="or keep none: --checkpoint-keep 0"):
        launch(tiny_plan(), every, quiet(), Fake)
    assert not list(tmp_path.iterdir())
    launch(tiny_plan(), told(tmp_path, steps=9, checkpoint_every=0), quiet(), Fake)  # one fits


class Filling(Fake):
    """The drive is full from the second step on, until `room` steps are done."""

    room = 5

    def step(self, checkpoint: Path | None = None) -> StepResult:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        full = 2 <= self.steps + 1 < self.room
        resource.setrlimit(resource.RLIMIT_FSIZE, (300 if full else most, most))
        return super().step(checkpoint)


@contextmanager
def unlimited() -> Iterator[None]:
    """No limit of files' sizes is left behind: pytest may write into a file next."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_drive_ends_no_training_and_loses_no_record(tmp_path: Path) -> None:
    out, how = StringIO(), told(tmp_path, steps=7, checkpoint_every=2)
    with unlimited():
        folder = launch(tiny_plan(), how, Console(file=out), Filling)
    assert tells(out.getvalue(), "record cannot be written", "File too large", "Training goes on")
    record = read_record(folder)
    assert [metric.step for metric in record.metrics] == list(range(1, 8))
    assert record.summary.status == "finished"


def test_a_record_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Filling, "room", 9)
    how = told(tmp_path, steps=4, checkpoint_keep=0)
    with unlimited(), pytest.raises(WorkerError, match=r"cannot be written.*File too large"):
        launch(tiny_plan(), how, quiet(), Filling)


class Crowded(Fake):
    """The last checkpoint has room at the third try; Ctrl-C at the first."""

    tries = 0

    def save(self, folder: Path) -> Path:
        Crowded.tries += 1
        if Crowded.tries == 1:
            os.kill(os.getpid(), signal.SIGINT)
        if Crowded.tries < 3:
            raise CheckpointError("the checkpoint could not be written (No space left on device)")
        return super().save(folder)


def test_the_last_checkpoint_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bigplan.launcher.steps.PAUSE", 0.0)
    monkeypatch.setattr(Crowded, "tries", 0)
    out = StringIO()
    folder = launch(tiny_plan(), told(tmp_path, steps=3), Console(file=out), Crowded)
    assert out.getvalue().count("Trying again for 10 minutes") == 1
    assert newest_step(folder) == 3
    monkeypatch.setattr(Crowded, "tries", -99)
    monkeypatch.setattr("bigplan.launcher.steps.PATIENCE", 0.0)
    with pytest.raises(CheckpointError, match="No space left"):
        launch(tiny_plan(), told(tmp_path, steps=3), quiet(), Crowded)


class Homeless(Fake):
    """In step 2 somebody removes the run's folder."""

    parent: Path
    writable = True

    def step(self, checkpoint: Path | None = None) -> StepResult:
        if self.steps == 1 and self.rank == 0:
            shutil.rmtree(self.parent)
            if not self.writable:
                self.parent.touch()  # no folder can be made where a file is
        return super().step(checkpoint)

    def write(self, folder: Path) -> Saved:
        try:
            return super().write(folder)
        except OSError as error:
            raise CheckpointError(f"the checkpoint could not be written ({error})") from error


def test_a_run_whose_folder_was_removed_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Homeless, "parent", tmp_path / "runs", raising=False)
    out = StringIO()
    options = told(tmp_path / "runs", steps=4)
    folder = launch(tiny_plan(), options, Console(file=out), Homeless)
    assert tells(out.getvalue(), "record cannot be written", "Training goes on")
    assert newest_step(folder) == 4
    assert [metric.step for metric in read_record(folder).metrics] == [2, 3, 4]
    record = read_record(launch(tiny_plan(), again(folder, steps=6), quiet(), Fake))
    assert record.summary.resumed == (4,)


def test_a_folder_that_is_gone_for_good_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Homeless, "parent", tmp_path / "runs", raising=False)
    monkeypatch.setattr(Homeless, "writable", False)
    with pytest.raises(CheckpointError, match=r"is gone, so the state of step 4.*launch it again"):
        launch(tiny_plan(), told(tmp_path / "runs", steps=4), quiet(), Homeless)


def test_a_missing_gpu_is_told_before_a_full_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    nothing = shutil.disk_usage("/")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: nothing)
    plan = tiny_plan()
    with pytest.raises(PreflightError, match="is free; free some"):
        launch(plan, told(tmp_path), quiet(), Fake)
    group = plan.cluster.group
    gpu = group.gpu.model_copy(update={"device": "cuda"})
    cluster = plan.cluster.model_copy(
        update={"node_groups": (group.model_copy(update={"gpu": gpu}),)}
    )
    with pytest.raises(PreflightError, match=r"needs 2 GPU.*has none"):
        launch(plan.model_copy(update={"cluster": cluster}), told(tmp_path), quiet(), Fake)
    assert not list(tmp_path.iterdir())
