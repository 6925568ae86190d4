"""Tasks in processes: results of all, and what becomes of those whose process dies."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import closing

import pytest

from bigplan.experiment.workers import Lost, results, usable_cores


def work(task: int) -> tuple[int, int]:
    if task < 0:
        os.kill(os.getpid(), -task)
    if task == 7:
        time.sleep(1e6)
    return task, os.getpid()


def done(found: Sequence[tuple[int, int] | Lost[int]]) -> list[int]:
    return sorted(one[0] for one in found if not isinstance(one, Lost))


def test_without_processes_this_one_works() -> None:
    assert list(results([1, 2], work, 0)) == [(1, os.getpid()), (2, os.getpid())]
    assert list(results([], work, 8)) == []


def test_a_single_process_is_another_one() -> None:
    (first, second) = results([1, 2], work, 1)
    assert not isinstance(first, Lost)
    assert not isinstance(second, Lost)
    assert first[1] == second[1] != os.getpid()


def test_a_process_that_dies_takes_one_task_with_it() -> None:
    tasks = [1, -signal.SIGKILL, 2, -signal.SIGTERM, 3, 4]
    found = list(results(tasks, work, 2))
    assert done(found) == [1, 2, 3, 4]
    lost = {one.task: one for one in found if isinstance(one, Lost)}
    assert lost.keys() == {-signal.SIGKILL, -signal.SIGTERM}
    assert "memory runs out" in lost[-signal.SIGKILL].reason
    assert "exit code -15" in lost[-signal.SIGTERM].reason
    assert os.getpid() not in {one[1] for one in found if not isinstance(one, Lost)}


def test_closing_ends_the_processes_at_once() -> None:
    with closing(results([1, 7, 7], work, 2)) as found:
        first = next(found)
    assert not isinstance(first, Lost)
    assert first[0] == 1
    with pytest.raises(ProcessLookupError):
        os.kill(first[1], 0)


def test_cores() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
