"""Work divided among processes: one that dies loses one task, not the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_KILLED = 9  # SIGKILL, which Windows has not
_PATIENCE = 5.0  # for a process to end after it was told to


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Lost(Generic[T]):
    """A task whose process ended before it was done; `code` is its exit code, or minus a signal."""

    task: T
    code: int | None

    @property
    def reason(self) -> str:
        """The loss in words."""
        if self.code == -_KILLED:
            return (
                "its process was killed, as happens where memory runs out; run it again, with "
                "fewer --jobs"
            )
        return f"its process ended with exit code {self.code}, which is a bug of bigplan"


def results(
    tasks: Sequence[T], work: Callable[[T], R], jobs: int
) -> Generator[R | Lost[T], None, None]:
    """Results of `work` for every task, as each is done, by up to `jobs` processes; 0: this one.

    Close the generator to end all processes at once. `work` and tasks are pickled. A search takes
    Ctrl-C as a request for its best plan so far. Where that is no result, let processes do the
    work.
    """
    if not jobs:
        yield from map(work, tasks)
        return
    waiting, busy = deque(tasks), dict[Connection, tuple[SpawnProcess, T]]()
    try:
        for _ in range(min(jobs, len(tasks))):
            _give(busy, waiting, *_started(work))
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection), "nothing else is waited for"
                process, task = busy.pop(connection)
                try:
                    result: R | Lost[T] = connection.recv()
                except (EOFError, OSError):
                    process.join(_PATIENCE)
                    result = Lost(task, process.exitcode)
                    if waiting:
                        _give(busy, waiting, *_started(work))
                else:
                    _give(busy, waiting, connection, process)
                yield result
    finally:
        for process, _ in busy.values():
            process.terminate()
        for process, _ in busy.values():
            process.join(_PATIENCE)


def _give(
    busy: dict[Connection, tuple[SpawnProcess, T]],
    waiting: deque[T],
    connection: Connection,
    process: SpawnProcess,
) -> None:
    """The next task; a process for which there is none ends when its connection closes."""
    if not waiting:
        connection.close()
        return
    task = waiting.popleft()
    busy[connection] = process, task
    connection.send(task)


def _started(work: Callable[[T], R]) -> tuple[Connection, SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work), daemon=True)
    with _deaf():
        process.start()
    theirs.close()  # otherwise this process would never see its end
    return ours, process


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes started within ignore Ctrl-C; the process that started them ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(connection: Connection, work: Callable[[T], R]) -> None:
    """Do tasks until there are no more, or the parent has ended."""
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        done = work(task)
        try:
            connection.send(done)
        except OSError:
            return
