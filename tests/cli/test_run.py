"""`bigplan launch --resume` and its options, with workers that only count."""

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from bigplan.cli.as_json import FORMAT as JSON_FORMAT
from bigplan.launcher.checkpoints import checkpoints, step_of
from bigplan.launcher.leftovers import ListedLaunch
from bigplan.launcher.record import read_record
from bigplan.plan import save_plan
from tests.cli.conftest import Run
from tests.launcher.fakes import LocalCrew, plan_with, without_ray
from tests.tiny import tiny_plan, write_cluster
from tests.wording import tells

__all__ = ["without_ray"]
pytestmark = pytest.mark.usefixtures("without_ray")

RUN = Path("runs/tiny-llama-test-1")


@pytest.fixture
def ran(bigplan: Run) -> Run:
    """A run of the plan's three steps lies in the current folder."""
    save_plan(tiny_plan(), Path("plan.yaml"))
    code, out, _ = bigplan("launch", "plan.yaml", "--checkpoint-every", "2")
    assert code == 0
    assert "3 steps in" in out
    return bigplan


def kept() -> list[int]:
    return [step_of(path) for path in checkpoints(RUN)]


def test_a_run_goes_on_as_it_was_launched(ran: Run) -> None:
    assert kept() == [2, 3]
    code, out, _ = ran("launch", "--resume", RUN, "--steps", "7")
    assert code == 0
    assert "steps 4 to 7" in out
    assert [metric.step for metric in read_record(RUN).metrics] == list(range(1, 8))
    assert kept() == [6, 7]  # still every second step
    how = json.loads((RUN / "launch.json").read_text())
    assert (how["steps"], how["checkpoint_every"], how["checkpoint_keep"]) == (7, 2, 2)


def test_a_launch_as_json_tells_how_it_ended(ran: Run) -> None:
    code, out, err = ran("launch", "--resume", RUN, "--steps", "4", "--json")
    assert code == 0
    told = json.loads(out)
    assert (told["format"], told["run"]) == (JSON_FORMAT, str(RUN.resolve()))
    assert told["summary"]["status"] == "finished"
    assert told["last_step"]["step"] == 4
    assert "Launching" in err  # what happens meanwhile


def test_a_run_whose_plan_was_edited(ran: Run) -> None:
    """It goes on with what the plan's decisions give; its report keeps what was promised."""
    before = ran("report", RUN)
    text = (RUN / "plan.yaml").read_text()
    mfu = f"mfu: {tiny_plan().predicted.mfu!r}"
    assert text.count(mfu) == 1
    (RUN / "plan.yaml").write_text(text.replace(mfu, "mfu: 0.99"))
    assert ran("report", RUN) == before
    code, _, err = ran("launch", "--resume", RUN, "--steps", "4")
    assert code == 0
    assert tells(err, "plan.yaml", "predicted.mfu")
    assert read_record(RUN).plan == tiny_plan()
    (RUN / "plan.yaml").write_text(text.replace("micro_batch: 2", "micro_batch: 3"))
    code, _, err = ran("launch", "--resume", RUN, "--steps", "5")
    assert code == 2
    assert "strategy.micro_batch: 3 is no way to split" in err


def test_a_plan_made_anew_for_the_run(ran: Run) -> None:
    capped = ("--cap", "gpu=2.3MiB")
    code, _, err = ran("launch", "--resume", RUN, "--steps", "5", *capped)
    assert code == 0, err
    record = read_record(RUN)
    assert record.plan.cluster.group.gpu.memory < tiny_plan().cluster.group.gpu.memory
    split = [(plan.strategy, plan.placement) for plan in (record.plan, tiny_plan())]
    assert split[0] != split[1]
    assert len(record.metrics) == 5


def test_a_cap_does_not_lift_one(ran: Run) -> None:
    code, _, err = ran("launch", "--resume", RUN, "--steps", "5", "--cap", "gpu=8GiB")
    assert code == 2
    assert "--cap gpu=8 GiB is more than the 64 MiB" in err
    assert "--cluster" in err


def test_another_plan_or_experiment_is_named(ran: Run, tmp_path: Path) -> None:
    save_plan(tiny_plan(1), Path("one.yaml"))
    assert ran("launch", "one.yaml", "--resume", RUN, "--steps", "4")[0] == 0
    assert read_record(RUN).summary.ranks == 1
    write_cluster(tmp_path)
    Path("e.yaml").write_text(
        "model: tiny-llama-test\ncluster: ./small.yaml\n"
        "training: {sequence_length: 32, global_batch: 4, precision: fp32}\n"
        "launch: {steps: 6, checkpoint_keep: 1}\n"
    )
    code, _, err = ran("launch", "e.yaml", "--resume", RUN)
    assert code == 0, err
    assert kept() == [6]
    longer = (
        Path("e.yaml").read_text().replace("fp32}", "fp32, steps: 8}").replace("steps: 6, ", "")
    )
    Path("e.yaml").write_text(longer)
    code, _, err = ran("launch", "e.yaml", "--resume", RUN)
    assert code == 0, err
    assert kept() == [8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--resume", RUN), "has done 3 steps, and 3 are asked for"),
        (("--resume", RUN, "--steps", "9", "--seed", "1"), "seed was 0 and is 1"),
        (("--resume", RUN, "--run-dir", "there"), "stays in its folder"),
        (("--resume", "nowhere"), "nowhere: no such file or folder"),
        (("plan.yaml", "--checkpoint-every", "-1"), "checkpoint_every"),
        (("plan.yaml", "--resume", RUN, "--cap", "gpu=1GiB"), "caps cannot change"),
    ],
)
def test_what_cannot_be_resumed(ran: Run, arguments: tuple[object, ...], message: str) -> None:
    code, out, err = ran("launch", *arguments)
    assert code == 2
    assert message in err
    assert "Train" not in out  # nothing was planned for it, which may take minutes
    assert len(read_record(RUN).metrics) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "9", "--seed", "1"), "seed was 0 and is 1"),
        (("--steps", "3", "--cap", "host=200MiB"), "has done 3 steps, and 3 are asked for"),
    ],
)
def test_what_cannot_go_on_is_refused_before_it_is_planned(
    ran: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    """A search may take minutes."""
    monkeypatch.setattr("bigplan.cli.run.plan_experiment", None)
    code, _, err = ran("launch", "--resume", RUN, *arguments)
    assert code == 2
    assert message in err


def test_a_place_for_the_run_is_looked_for_before_it_is_planned(
    bigplan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cluster(tmp_path)
    monkeypatch.setattr("bigplan.cli.run.plan_experiment", None)
    Path("file").write_text("")
    code, _, err = bigplan(
        *("launch", "--model", "tiny-llama-test", "--cluster", "small.yaml", "--seq-len", 32),
        *("--global-batch", 4, "--run-dir", "file/runs"),
    )
    assert code == 2
    assert "file is a file; name another folder with --run-dir" in " ".join(err.split())


def test_how_a_run_is_launched_can_stand_in_the_experiment(bigplan: Run, tmp_path: Path) -> None:
    write_cluster(tmp_path)
    Path("e.yaml").write_text(
        "model: tiny-llama-test\ncluster: small.yaml\n"
        "training: {sequence_length: 32, global_batch: 4, precision: fp32, steps: 4}\n"
        "launch: {checkpoint_every: 1, checkpoint_keep: 3, tensorboard: false}\n"
    )
    assert bigplan("launch", "e.yaml", "--checkpoint-keep", "2")[0] == 0
    assert kept() == [3, 4]
    assert not (RUN / "tensorboard").exists()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (os.mkfifo, "a pipe or a device, which is not read"),
        (
            lambda path: Path(path).write_text("32 bytes are a token too few: 32"),
            "needs at least 33",
        ),
        (lambda path: None, "cannot be read"),
    ],
)
def test_a_plans_data_is_looked_at_before_ray_starts(
    bigplan: Run, make: Callable[[str], object], told: str
) -> None:
    """A plan may be launched long after it was made, and elsewhere."""
    make("data")
    save_plan(plan_with(data="data"), Path("plan.yaml"))
    code, _, err = bigplan("launch", "plan.yaml")
    assert code == 2
    assert told in err
    assert not Path("runs").exists()


def test_what_a_killed_launch_left_is_named_by_the_next(
    bigplan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder, scratch = tmp_path / "state" / "bigplan" / "launches", tmp_path / "scratch"
    for path in (folder, scratch):
        path.mkdir(parents=True)
    entry = ListedLaunch(
        host=socket.gethostname(), run=str(tmp_path / "gone"), scratch=str(scratch)
    )
    (folder / "killed.json").write_text(entry.model_dump_json())
    save_plan(tiny_plan(), Path("plan.yaml"))
    code, out, _ = bigplan("launch", "plan.yaml")
    assert code == 0
    assert f"scratch in {scratch}" in out
    assert "`bigplan clean` removes it" in out
    assert "Would remove" in bigplan("clean", "--dry-run")[1]
    (left,) = json.loads(bigplan("clean", "--dry-run", "--json")[1])["leftovers"]
    assert left["scratch"] == str(scratch)
    assert scratch.exists()
    assert str(scratch) in bigplan("clean")[1]
    assert not scratch.exists()
    assert "Nothing is left" in bigplan("clean")[1]


def test_a_resumption_that_is_stopped_early_says_how_to_go_on(
    ran: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(crew: LocalCrew, method: str, *arguments: object, doing: str) -> list[object]:
        os.kill(os.getpid(), signal.SIGINT)
        return []

    monkeypatch.setattr(LocalCrew, "ask", stopped)
    code, out, _ = ran("launch", "--resume", RUN, "--steps", "5")
    assert code == 130
    assert tells(out, "Stopped", "checkpoint", "step 3")
    assert f"Go on with: bigplan launch --resume {RUN}" in out
