"""Launches through a real local Ray: the native worker once, fakes for what goes wrong."""

import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from bigplan.errors import LostError, PreflightError, RefusedError, WorkerError
from bigplan.launcher import driver, heartbeat, placing
from bigplan.launcher.driver import launch
from bigplan.launcher.placing import Layout
from bigplan.launcher.record import read_record
from bigplan.launcher.session import Session, ray_session
from bigplan.plan import Plan
from bigplan.planner import Request, make_plan
from bigplan.runtime.checkpoint import latest
from bigplan.runtime.export.hf import export_checkpoint
from bigplan.runtime.parallel.apart import Apart
from bigplan.runtime.result import Finished, StepResult
from bigplan.spec.catalog import find_cluster
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from tests.launcher import fakes
from tests.launcher.fakes import Fake, plan_with, quiet, told
from tests.tiny import small_cluster, tiny_plan

ray = pytest.importorskip("ray")


class Short(Fake):
    trouble_in = "preflight"

    def act(self) -> None:
        raise PreflightError("this machine has less host memory than the plan promises")


class Dies(Fake):
    trouble_in = "step 2"

    def act(self) -> None:
        time.sleep(0.2)
        os._exit(1)


class DiesOnce(Fake):
    """In its second step, where it began with its first."""

    trouble_in = "step 2"

    def trouble(self, where: str) -> None:
        if not self.resumed:
            super().trouble(where)

    def act(self) -> None:
        os._exit(1)


class Hangs(Fake):
    """Rank 1 freezes in step 3; in the crew after it rank 0 waits for ever in step 4."""

    began = 0

    def start(self, meeting: Any, resume: Path | None = None, apart: Apart | None = None) -> int:
        self.began = super().start(meeting, resume, apart)
        return self.began

    def step(self, checkpoint: Path | None = None) -> StepResult:
        if (self.rank, self.began, self.steps) == (1, 0, 2):
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1e6)  # another thread may take the signal, and this one end the step first
        if (self.rank, self.began, self.steps) == (0, 2, 3):
            time.sleep(1e6)
        return super().step(checkpoint)


class Breaks(Fake):
    trouble_in = "step 1"

    def act(self) -> None:
        raise ZeroDivisionError("a bug")


@pytest.fixture(scope="module")
def running(warm: None) -> Iterator[Session]:
    """A local Ray as launches start it, for 4 s of a core each."""
    with ray_session(None, 2, cuda=False) as session:
        yield session


@pytest.fixture
def one_ray(running: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run in it. Those that start their own come before, in this file."""
    monkeypatch.setattr(driver, "ray_session", lambda *_, **__: nullcontext(running))


@pytest.fixture(autouse=True)
def _by_value(warm: None) -> None:
    """Actors cannot import a test module."""
    for module in (sys.modules[__name__], fakes):
        ray.cloudpickle.register_pickle_by_value(module)


def test_experts_are_planned_launched_and_exported(tmp_path: Path) -> None:
    """From a description to a record, and files of Mixtral's: each device has a part of each."""
    sizes = tiny_plan().model.model_dump() | {"layers": 2, "ffn": 64, "rope_theta": 1e6}
    model = ModelSpec.model_validate(
        sizes | {"name": "moe", "experts": 4, "experts_per_token": 2, "router_loss": 0.01}
    )
    training = Training(sequence_length=32, global_batch=4, precision="fp32", steps=3)
    plan = make_plan(Request(model, training, small_cluster(), {"tp": 2}, engine="native"))
    folder = launch(plan, told(tmp_path, checkpoint_every=3), quiet())
    record = read_record(folder)
    assert folder == tmp_path / "moe-1"
    assert record.plan == plan
    assert [metric.step for metric in record.metrics] == [1, 2, 3]
    losses = [metric.loss or math.nan for metric in record.metrics]
    assert losses[-1] < losses[0] < 1.1 * math.log(model.vocab)
    assert record.summary.status == "finished"
    assert len(record.summary.digest) > 8
    assert record.measured is not None
    assert {event.op for event in record.measured.events} >= {"forward", "backward", "update"}
    host = next(row for row in record.summary.memory if row.tier == "host")
    assert host.measured == host.predicted > 0  # both of the tensors, whatever pages round up to
    assert any("a worker's process takes about" in note for note in record.summary.notes)
    assert not (folder / "scratch").exists()
    assert not ray.is_initialized()
    export_checkpoint(latest(folder / "checkpoints"), tmp_path / "hf", "fp32")
    names = load_file(tmp_path / "hf" / "model.safetensors")
    assert names["model.layers.1.block_sparse_moe.experts.3.w2.weight"].shape == (64, 64)


@pytest.mark.usefixtures("one_ray")
def test_a_refused_preflight_reaches_the_user_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="less host memory"):
        launch(tiny_plan(), told(tmp_path), quiet(), Short)
    assert not list(tmp_path.iterdir())


class Meets(Fake):
    """Says where its ranks met, and how nice they are."""

    met = ""

    def start(self, meeting: Any, resume: Path | None = None, apart: Apart | None = None) -> int:
        self.met = str(meeting)
        return super().start(meeting, resume, apart)

    def finish(self) -> Finished:
        return replace(super().finish(), notes=(self.met, f"nice by {os.nice(0)}"))


@pytest.mark.usefixtures("one_ray")
def test_ranks_meet_among_the_files_of_their_ray(tmp_path: Path, running: Session) -> None:
    """So a launch that is killed leaves no folder of its own."""
    record = read_record(launch(tiny_plan(), told(tmp_path, steps=1), quiet(), Meets))
    (met,) = {Path(note) for note in record.summary.notes if note.startswith("/")}
    assert f"nice by {os.nice(0)}" in record.summary.notes  # as this process is, and no more
    assert running.folder is not None
    assert met.is_relative_to(running.folder)
    assert not met.parent.exists()


@pytest.mark.usefixtures("one_ray")
def test_a_fake_worker_shows_what_is_recorded(tmp_path: Path) -> None:
    record = read_record(launch(tiny_plan(), told(tmp_path, steps=4), quiet(), Fake))
    assert [metric.loss for metric in record.metrics] == [4.0, 3.0, 2.0, 1.0]
    assert record.measured is not None
    assert record.measured.seconds == 3.0  # the median of steps 2, 3 and 4: the first is not steady
    assert record.summary.measured_step_seconds == 3.0
    memory = {row.tier: row.measured for row in record.summary.memory}
    assert memory == {"gpu": 11, "host": 200, "nvme": 0}  # worst GPU, both ranks of the node
    assert record.summary.notes == ("1 thread",)


@pytest.mark.usefixtures("one_ray")
def test_a_dead_rank_is_named_though_its_peer_fails_first(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerError, match=r"rank 1 died while running step 2.*--cap host"
    ) as caught:
        launch(tiny_plan(), told(tmp_path, max_restarts=0), quiet(), Dies)
    assert "error.txt" in str(caught.value)
    assert "No checkpoint was written yet" in str(caught.value)
    record = read_record(tmp_path / "tiny-llama-test-1")
    assert (record.summary.status, record.summary.steps) == ("failed", 1)


class DiesOfData(Fake):
    """Somebody empties the file that it has mapped."""

    trouble_in = "step 2"

    def act(self) -> None:
        data = np.memmap(self.data, np.uint8, "r")
        os.truncate(self.data, 0)
        data.sum()

    def __init__(self, plan: Plan, rank: int, scratch: Path) -> None:
        super().__init__(plan, rank, scratch)
        self.data = str(plan.training.data)


@pytest.mark.usefixtures("one_ray")
def test_data_that_was_cut_short_is_told_and_not_trained_on(tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("a" * 100_000)
    with pytest.raises(WorkerError, match=r"text\.txt was cut from 100,000 to 0 bytes") as caught:
        launch(plan_with(data=str(data)), told(tmp_path / "runs"), quiet(), DiesOfData)
    assert not isinstance(caught.value, LostError)  # it does not start again


@pytest.mark.usefixtures("one_ray")
def test_a_dead_rank_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    """Without clipping, a state is written in its own step."""
    how = told(tmp_path, steps=4, checkpoint_every=1)
    record = read_record(launch(plan_with(clip_norm=None), how, quiet(), DiesOnce))
    assert [metric.loss for metric in record.metrics] == [4.0, 3.0, 2.0, 1.0]
    assert [metric.restarts for metric in record.metrics] == [None, 1, 1, 1]
    (lost,) = record.summary.restarts
    assert (lost.done, lost.back_to, record.summary.status) == (1, 1, "finished")
    assert "rank 1 died while running step 2" in lost.reason


@pytest.mark.usefixtures("one_ray")
def test_ranks_that_hang_are_named_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT", 4.0)
    monkeypatch.setattr(heartbeat, "EVERY", 0.2)
    how = told(tmp_path, steps=5, checkpoint_every=1)
    record = read_record(launch(plan_with(clip_norm=None), how, quiet(), Hangs))
    assert [metric.loss for metric in record.metrics] == [4.0, 3.0, 2.0, 1.0, 0.0]
    frozen, waiting = record.summary.restarts
    assert (frozen.back_to, waiting.back_to) == (2, 3)
    assert re.match(r"rank 1 \(process \d+ on node \w+\) gave no sign of life", frozen.reason)
    assert re.match(r"rank 0 .* got nothing done for \d+ s while running step 4", waiting.reason)
    assert waiting.reason.endswith("last at counting")
    process = int(frozen.reason.split("process ")[1].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.usefixtures("one_ray")
def test_a_bug_in_a_worker_is_told_in_one_line_with_its_traceback_on_file(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="rank 1: ZeroDivisionError: a bug") as caught:
        launch(tiny_plan(), told(tmp_path), quiet(), Breaks)
    assert "\n" not in str(caught.value)
    assert "Traceback" in (tmp_path / "tiny-llama-test-1" / "error.txt").read_text()


def test_plans_that_cannot_run_are_refused_before_anything_starts(tmp_path: Path) -> None:
    plan = tiny_plan()
    dropping = plan.training.model_copy(update={"dropout": 0.1})
    with pytest.raises(RefusedError, match=r"does not execute dropout 0\.1"):
        launch(plan.model_copy(update={"training": dropping}), told(tmp_path), quiet())
    assert not list(tmp_path.iterdir())


def test_layout_shares_a_nodes_cores_among_its_ranks() -> None:
    layout = Layout.of(tiny_plan())
    assert (layout.ranks, layout.nodes, layout.cores) == (2, 1, 1)
    assert layout.bundle() == {"CPU": 2.0}


def test_layout_of_several_nodes() -> None:
    plan = tiny_plan()
    cluster = find_cluster("dgx-h100").with_nodes(2)
    wide = plan.model_copy(
        update={"cluster": cluster, "strategy": plan.strategy.model_copy(update={"dp": 16})}
    )
    layout = Layout.of(wide)
    assert (layout.per_node, layout.nodes) == (8, 2)
    assert layout.bundle() == {"CPU": float(layout.cores * 8), "GPU": 8.0}


def test_room_that_ray_does_not_take_back_holds_no_launch_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where SIGTERM has ended the raylet with the launch."""
    launch_is_over = threading.Event()
    monkeypatch.setattr(placing, "REMOVE_SECONDS", 0.01)
    monkeypatch.setattr(ray.util, "remove_placement_group", lambda _: launch_is_over.wait())
    placing.remove(None)
    launch_is_over.set()
