"""One rank as a Ray actor: the process that a worker of the runtime lives in."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Protocol, overload, runtime_checkable

from bigplan.engines import engine_of
from bigplan.importing import named
from bigplan.launcher.checkpoints import FOLDER
from bigplan.launcher.leftovers import is_listed, leftovers, listed
from bigplan.launcher.lock import hold, rank_lock
from bigplan.launcher.places import (
    Places,
    keep_only,
    leave_mark,
    marks,
    own_run,
    receive,
    remove_mark,
)
from bigplan.launcher.placing import gpus_here
from bigplan.launcher.preflight import Facts, listen_on, look
from bigplan.plan import Plan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch._C._distributed_c10d import Store

    from bigplan.runtime.execution.forwards import Part
    from bigplan.runtime.layers.preference import Scored
    from bigplan.runtime.parallel.apart import Apart
    from bigplan.runtime.result import Evaluated, Finished, PairData, Progress, StepResult


class RankWorker(Protocol):
    """What the launcher asks of a worker (bigplan.runtime.worker.NativeWorker)."""

    def preflight(self) -> None:
        """Raise PreflightError where the machine has less than the plan promises."""

    def start(
        self, meeting: Path | Store, resume: Path | None = None, apart: Apart | None = None
    ) -> int:
        """Join the others, allocate, initialise or read a checkpoint; the steps done before.

        `meeting`: for their addresses: a file that only the ranks may write, which need not exist,
        or a store that only they reach. `apart`: where the ranks' machines share no folder.
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


@runtime_checkable
class PairWorker(Protocol):
    """What it asks beside of one that learns from pairs of responses (runtime.forwards)."""

    def evaluate_pairs(self) -> Evaluated:
        """As evaluate, with rewards."""

    def pair_data(self) -> dict[Part, PairData]:
        """What log-probabilities are wanted of."""

    def score(self, part: Part, step: int) -> Scored:
        """Those of a global batch."""

    def refer(self, references: Mapping[Part, NDArray[np.float64]]) -> None:
        """All of them."""


class WorkerType(Protocol):
    """The worker's constructor; it allocates nothing."""

    def __call__(self, plan: Plan, rank: int, scratch: Path) -> RankWorker:
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
        # Nothing here may fail: Ray says little about an actor that was never created.
        if plan.strategy.ranks > 1 and plan.engine == "native":
            see_peers()
        self._run, self._rank = folders.run, rank
        self._lock_file = rank_lock(own_run(folders.run), rank)
        scratch = folders.scratch
        if scratch.is_relative_to(folders.run):  # no drive is named for tensors
            scratch = self._here(scratch)
        self._scratch = scratch / f"rank-{rank}"
        self._listed = ExitStack()
        self._make = partial(_make, worker, plan, rank, self._scratch)
        self._made: RankWorker | None = None

    def preflight(self) -> None:
        """Construct the worker once no earlier one of this rank is left, then see Worker."""
        self._lock = hold(self._lock_file)
        if not is_listed(self._scratch.parent):  # the launch is on another machine's list
            self._listed.enter_context(listed(own_run(self._run), self._scratch.parent))
        self._made = self._make()
        self._made.preflight()

    def look(self, mark: Path, token: str, cuda: bool) -> Facts:
        """Facts about this machine (preflight.look)."""
        mine = str(self._scratch.parent)
        left = tuple(str(each) for each in leftovers() if each.entry.scratch != mine)
        return look(_node(), self._scratch.parent, self._here(mark), token, left, cuda=cuda)

    def leave_mark(self) -> None:
        """Show other nodes this one's run folder (places.py)."""
        leave_mark(own_run(self._run), _node())

    def marks(self) -> tuple[str, ...]:
        """The nodes that share it."""
        return marks(own_run(self._run))

    def remove_mark(self) -> None:
        """Once all have seen it."""
        remove_mark(own_run(self._run), _node())

    def receive(self, step: str, manifest: str) -> None:
        """See places.receive."""
        receive(own_run(self._run), step, manifest)

    def keep_only(self, steps: tuple[str, ...]) -> None:
        """See places.keep_only."""
        keep_only(own_run(self._run), steps)

    def manifest(self, step: str) -> str:
        """The manifest of a checkpoint that is here."""
        return (own_run(self._run) / FOLDER / step / "manifest.json").read_text()

    def clock(self) -> float:
        """Seconds of this machine's clock."""
        return time.time()

    def listen(self, interface: str) -> None:
        """On which interface this process will talk to the other ranks."""
        listen_on(interface)

    def meeting_point(self) -> Path:
        """A file for ranks of this node alone, in a folder that only this user may enter."""
        return Path(mkdtemp(dir=self._scratch)) / "addresses"

    def start(self, meeting: Any, resume: Path | None, places: Places | None) -> int:
        """See Worker; `meeting` may be a Board, and `places` are told where there are several."""
        if not isinstance(meeting, Path):
            from bigplan.launcher.meeting import BoardStore

            meeting = self._store = BoardStore(meeting)
        if places is None:
            return self._worker().start(meeting, resume)
        from bigplan.runtime.parallel.apart import Apart

        place = places.of(self._rank)
        apart = Apart(place, places.ranks[place], places.bring)
        return self._worker().start(meeting, self._here(resume), apart)

    def step(self, checkpoint: Path | None) -> StepResult:
        """See Worker."""
        return self._worker().step(self._here(checkpoint))

    def save(self, folder: Path) -> Path:
        """See Worker."""
        return self._worker().save(self._here(folder))

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
        with suppress(OSError):  # other ranks have theirs there
            self._scratch.parent.rmdir()
        self._listed.close()

    @overload
    def _here(self, path: Path) -> Path: ...

    @overload
    def _here(self, path: None) -> None: ...

    def _here(self, path: Path | None) -> Path | None:
        """Where this node has what the launch has at a path of the run."""
        return path if path is None else own_run(self._run) / path.relative_to(self._run)

    def _worker(self) -> RankWorker:
        assert self._made is not None, "preflight comes first"
        return self._made


class PairActor(RankActor):
    """One rank, which may also learn from pairs of responses."""

    def evaluate_pairs(self) -> Evaluated:
        """See PairWorker."""
        return self._pair_worker().evaluate_pairs()

    def pair_data(self) -> dict[Part, PairData]:
        """See PairWorker."""
        return self._pair_worker().pair_data()

    def score(self, part: Part, step: int) -> Scored:
        """See PairWorker."""
        return self._pair_worker().score(part, step)

    def refer(self, references: Mapping[Part, NDArray[np.float64]]) -> None:
        """See PairWorker."""
        self._pair_worker().refer(references)

    def _pair_worker(self) -> PairWorker:
        worker = self._worker()
        assert isinstance(worker, PairWorker), "other engines refuse to learn from pairs"
        return worker


def see_peers() -> None:
    """Show CUDA the node's other GPUs behind this rank's own, which Ray alone shows.

    Between GPUs that a process sees copy engines carry gathers (runtime/parallel/copy_engines).
    CUDA reads the variable when it begins.
    """
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if own.isdecimal():
        others = (str(gpu) for gpu in range(gpus_here()) if str(gpu) != own)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join((own, *others))


def _node() -> str:
    """Ray's name of this node."""
    import ray

    key: str = ray.get_runtime_context().get_node_id()
    return key


def _make(worker: WorkerType | None, plan: Plan, rank: int, scratch: Path) -> RankWorker:
    if worker is None:
        worker = named(engine_of(plan).worker)
    shutil.rmtree(scratch, ignore_errors=True)  # what a killed run left there
    scratch.mkdir(parents=True)
    return worker(plan, rank, scratch)
