"""Workers and a crew for tests of the launcher: no Ray, no torch, milliseconds."""

import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bigplan.errors import CheckpointError
from bigplan.launcher import driver
from bigplan.launcher.actor import Folders, RankWorker, WorkerType
from bigplan.launcher.driver import LaunchOptions
from bigplan.plan import Plan, digest
from bigplan.runtime.parallel.apart import Apart
from bigplan.runtime.result import Finished, Progress, Saved, StepResult
from bigplan.spec.experiment import LaunchSpec
from bigplan.timeline import Event, Timeline
from tests.tiny import tiny_plan


class Fake:
    """A worker that counts steps, until it is told to do something else."""

    trouble_in = ""
    resumed = False

    def __init__(self, plan: Plan, rank: int, scratch: Path) -> None:
        self.rank, self.steps = rank, 0
        self.deferred = plan.training.deferred_updates
        (scratch / "offloaded.bin").write_bytes(b"x")

    def preflight(self) -> None:
        self.trouble("preflight")

    def start(self, meeting: Any, resume: Path | None = None, apart: Apart | None = None) -> int:
        assert stat.S_IMODE(meeting.parent.stat().st_mode) == 0o700
        assert not meeting.exists()
        if resume is not None:
            text = (resume / "state").read_text()
            if text == "damaged":
                raise CheckpointError(f"{resume} is damaged")
            self.steps, self.resumed = int(text), True
        return self.steps

    def step(self, checkpoint: Path | None = None) -> StepResult:
        saved = [self.write(checkpoint)] if checkpoint and self.deferred else []
        self.steps += 1
        self.trouble(f"step {self.steps}")
        saved += [self.write(checkpoint)] if checkpoint and not self.deferred else []
        seconds = float(self.steps)
        event = Event(0, "gpu compute", "forward", 1, 0, 0.0, seconds)
        return StepResult(
            self.steps,
            self.loss(),
            seconds,
            Timeline((event,), seconds),
            learning_rate=1e-3,
            gradient_norm=2.0,
            data_seconds=0.25 + self.rank,
            memory={"gpu": 10 + self.rank, "host": 100},
            saved=tuple(saved) if self.rank == 0 else (),
        )

    def loss(self) -> float:
        return 5.0 - self.steps

    def write(self, folder: Path) -> Saved:
        path = folder / f"step-{self.steps:06}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "state").write_text(str(self.steps))
        return Saved(self.steps, path, 1, 0.1)

    def save(self, folder: Path) -> Path:
        return self.write(folder).path

    def evaluate(self) -> float:
        return 7.0 - self.steps

    def finish(self) -> Finished:
        threads = os.environ["OMP_NUM_THREADS"]
        memory = {"gpu": 10 + self.rank, "host": 100, "nvme": 0}
        return Finished(memory, (f"{threads} thread",), "same")

    def progress(self) -> Progress:
        return Progress(self.steps, ("counting",))

    def close(self) -> None:
        pass

    def trouble(self, where: str) -> None:
        if where != self.trouble_in:
            return
        if self.rank == 1:
            self.act()
        if where.startswith("step"):  # the peers of a lost rank fail too, a moment earlier
            raise RuntimeError("connection closed by peer")

    def act(self) -> None:
        raise NotImplementedError


class LocalCrew:
    """Fake workers called one after the other, in this process."""

    def __init__(
        self,
        plan: Plan,
        folders: Folders,
        interface: str | None,
        worker: WorkerType | None,
        meanwhile: Callable[[], None],
    ) -> None:
        self.meanwhile = meanwhile
        self.meeting = folders.scratch / "meeting"
        self.meeting.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.workers: list[RankWorker] = []
        for rank in range(plan.strategy.ranks):
            scratch = folders.scratch / f"rank-{rank}"
            scratch.mkdir(parents=True, exist_ok=True)
            self.workers.append((worker or Fake)(plan, rank, scratch))

    def prepare(self) -> str:
        return ""

    def start(self, checkpoint: Path | None) -> int:
        done: int = self.ask("start", self.meeting_point(), checkpoint, doing="starting")[0]
        return done

    def meeting_point(self) -> Path:
        return self.meeting / "addresses"

    def ask(self, method: str, *arguments: object, doing: str) -> list[Any]:
        results = [getattr(worker, method)(*arguments) for worker in self.workers]
        self.meanwhile()
        return results

    def dismiss(self, *, head: bool = True) -> None:
        self.workers = []


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """Files of this process take no byte beyond `size`, as on a full disk."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@contextmanager
def no_ray(address: str | None, cpus: int, cuda: bool) -> Iterator[None]:
    yield None


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run in this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(driver, "Crew", LocalCrew)
    monkeypatch.setattr(driver, "ray_session", no_ray)


def plan_with(**training: object) -> Plan:
    plan = tiny_plan()
    changed = plan.training.model_copy(update=training)
    inputs = {**plan.inputs, "training": digest(changed)}
    return plan.model_copy(update={"training": changed, "inputs": inputs})


def told(folder: Path, **how: object) -> LaunchOptions:
    return LaunchOptions(LaunchSpec.model_validate({"run_dir": str(folder), **how}))


def quiet() -> Console:
    return Console(file=Path(os.devnull).open("w"))
