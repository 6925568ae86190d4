"""One rank as a Ray actor: the process that a worker of the runtime lives in."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Protocol

from bigplan.engines import engine_of
from bigplan.importing import named
from bigplan.launcher.lock import hold, rank_lock
from bigplan.launcher.preflight import Facts, listen_on, look
from bigplan.plan import Plan

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from bigplan.runtime.result import Finished, Progress, StepResult


class Worker(Protocol):
    """What the launcher asks of a worker (bigplan.runtime.worker.Worker)."""

    def preflight(self) -> None:
        """Raise PreflightError where the machine has less than the plan promises."""

    def start(self, meeting: Path | Store, resume: Path | None = None) -> int:
        """Join the others, allocate, initialise or read a checkpoint; the steps done before.

        `meeting`: for their addresses: a file that only the ranks may write, which need not exist,
        or a store that only they reach.
        Raises CheckpointError where the checkpoint cannot be used.
        """

    def step(self, checkpoint: Path | None = None) -> StepResult:
        """One optimizer step; into the folder `checkpoint` goes the state from before it."""

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of the state now; training may go on after it."""

    def evaluate(self) -> float:
        """Mean loss over the validation data."""

    def finish(self) -> Finished:
        """Apply what is pending."""

    def progress(self) -> Progress:
        """How far it is; asked from another thread while a call runs."""

    def close(self) -> None:
        """Give everything back."""


class WorkerType(Protocol):
    """The worker's constructor; it allocates nothing."""

    def __call__(self, plan: Plan, rank: int, scratch: Path) -> Worker:
        """A worker for one rank; `scratch` is its own folder for offloaded tensors."""


@dataclass(frozen=True)
class Folders:
    """A run's record, and where its offloaded tensors go."""

    run: Path
    scratch: Path


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life."""

    node: str  # Ray's name of it
    process: int
    ended: int  # see Progress
    doing: tuple[str, ...]


class RankActor:
    """Owns one worker, its process and its scratch folder."""

    def __init__(self, plan: Plan, rank: int, folders: Folders, worker: WorkerType | None) -> None:
        # Nothing that can fail: Ray tells little about an actor that was never created.
        self._lock_file = rank_lock(folders.run, rank)
        self._scratch = folders.scratch / f"rank-{rank}"
        self._make = partial(_make, worker, plan, rank, self._scratch)
        self._made: Worker | None = None

    def preflight(self) -> None:
        """Construct the worker once no earlier one of this rank is left, then see Worker."""
        self._lock = hold(self._lock_file)
        self._made = self._make()
        self._made.preflight()

    def look(self, scratch: Path, mark: Path, token: str, cuda: bool) -> Facts:
        """What there is on this machine (preflight.look)."""
        return look(_node(), scratch, mark, token, cuda=cuda)

    def clock(self) -> float:
        """Seconds of this machine's clock."""
        return time.time()

    def listen(self, interface: str) -> None:
        """On which interface this process will talk to the other ranks."""
        listen_on(interface)

    def meeting_point(self) -> Path:
        """A file for ranks of this node alone, in a folder that only this user may enter."""
        return Path(mkdtemp(dir=self._scratch)) / "addresses"

    def start(self, meeting: Any, resume: Path | None) -> int:
        """See Worker; `meeting` may be a Board."""
        if not isinstance(meeting, Path):
            from bigplan.launcher.meeting import BoardStore

            meeting = self._store = BoardStore(meeting)
        return self._worker().start(meeting, resume)

    def step(self, checkpoint: Path | None) -> StepResult:
        """See Worker."""
        return self._worker().step(checkpoint)

    def save(self, folder: Path) -> Path:
        """See Worker."""
        return self._worker().save(folder)

    def evaluate(self) -> float:
        """See Worker."""
        return self._worker().evaluate()

    def finish(self) -> Finished:
        """See Worker."""
        return self._worker().finish()

    def beat(self) -> Beat:
        """What it is doing, answered beside its other calls."""
        ended: int = 0
        doing: tuple[str, ...] = ()
        if self._made is not None:
            progress = self._made.progress()
            ended, doing = progress.ended, progress.doing
        return Beat(_node(), os.getpid(), ended, doing)

    def close(self) -> None:
        """See Worker; the scratch folder goes too."""
        if self._made is not None:
            self._made.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _worker(self) -> Worker:
        assert self._made is not None, "preflight comes first"
        return self._made


def _node() -> str:
    """Ray's name of this node."""
    import ray

    key: str = ray.get_runtime_context().get_node_id()
    return key


def _make(worker: WorkerType | None, plan: Plan, rank: int, scratch: Path) -> Worker:
    if worker is None:
        worker = named(engine_of(plan).worker)
    shutil.rmtree(scratch, ignore_errors=True)  # what a killed run left there
    scratch.mkdir(parents=True)
    return worker(plan, rank, scratch)
