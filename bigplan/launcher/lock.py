"""One launch at a time in a run's folder, and one process per rank: file locks end with a process.

After a `kill -9` of the launch its workers live on for a moment, and may be writing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bigplan.errors import RefusedError
from bigplan.system import SYSTEM

LAUNCH = ".lock"  # the file that a launch holds locked
GLANCE = 0.5  # seconds: who looks whether a run is in use holds its lock for an instant
PATIENCE = 60.0  # seconds: Ray's workers end within a few of their driver
_PAUSE = 0.05


@contextmanager
def only_launch(run: Path) -> Iterator[None]:
    """Hold the run's folder. Raises RefusedError where another launch does."""
    with _only(run, "a launch"):
        yield


@contextmanager
def only_experiment(folder: Path) -> Iterator[None]:
    """Hold an experiment's folder. Raises RefusedError where another process does.

    Each of two would take the runs that the other has just begun for failed ones, and remove them.
    """
    with _only(folder, "an experiment"):
        yield


@contextmanager
def _only(folder: Path, what: str) -> Iterator[None]:
    try:
        file = _locked(folder / LAUNCH, GLANCE)
    except OSError as error:
        raise RefusedError(
            f"{folder} cannot be written to: {error.strerror}; make it writable, or copy it to a "
            "place that is"
        ) from None
    if file is None:
        raise RefusedError(
            f"{folder} is in use by {what} that is still running; wait until it ends, or stop it "
            "with Ctrl-C"
        )
    with file:
        yield


def in_use(run: Path) -> bool | None:
    """Whether a launch has the run's folder; None where that cannot be told."""
    try:
        with (run / LAUNCH).open() as file:
            _lock(file, alone=False)
    except BlockingIOError:
        return True
    except OSError:  # a copy without the file, or a file system without locks
        return None
    return False


def rank_lock(run: Path, rank: int) -> Path:
    """The file that the process of a rank holds locked."""
    return run / f".lock-rank-{rank}"


def forget(run: Path, ranks: Sequence[int]) -> None:
    """Stop waiting for these ranks: a file server may keep a lost machine's locks for minutes."""
    for rank in ranks:
        rank_lock(run, rank).unlink(missing_ok=True)


def hold(path: Path) -> IO[str]:
    """Lock a file for as long as this process lives, waiting for the one that has it.

    Raises RefusedError where that one does not end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _locked(path, PATIENCE)
    if file is None:
        raise RefusedError(
            f"a worker of an earlier launch still runs in {path.parent} after {PATIENCE:.0f} s; "
            "end that process (`fuser` names it), then resume"
        )
    return file


def wait_for_workers(run: Path) -> None:
    """Return once no worker of an earlier launch is left. Raises RefusedError."""
    for path in run.glob(".lock-rank-*"):
        hold(path).close()


def _locked(path: Path, patience: float) -> IO[str] | None:
    """The file, locked, or None where another process kept it locked."""
    file = path.open("a")
    end = time.monotonic() + patience
    while True:
        try:
            _lock(file, alone=True)
        except BlockingIOError:
            if time.monotonic() >= end:
                file.close()
                return None
            time.sleep(_PAUSE)
        except OSError:  # a file system without locks: nothing can be told
            return file
        else:
            return file


def _lock(file: IO[str], *, alone: bool) -> None:
    """Raises BlockingIOError where another process has it, OSError where there are no locks."""
    if SYSTEM == "Windows":  # where nothing is launched
        raise OSError(f"{SYSTEM} has no locks of this kind")
    import fcntl

    fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
