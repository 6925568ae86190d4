"""Killed anywhere, a run that is started again computes what one that lives does."""

from __future__ import annotations

import json
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

from tests.runtime.checkpoint.killed import PLACES, STEPS, Kill, plan_of, train
from tests.runtime.checkpoints import running
from tests.runtime.processes import server

NAMES = ("nvme", "host", "gpu")  # a killed run goes on under another plan
SECONDS = 3  # of random kills: a process starts within half a second


class Whole(NamedTuple):
    """Losses of all steps, and the digest of the last weights."""

    losses: list[float]
    digest: str


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes that have torch imported when they start."""
    return server()


@pytest.fixture(scope="module")
def whole() -> Whole:
    """A run that lives."""
    with running(plan_of("nvme")) as (worker, _):
        losses = [worker.step().loss for _ in range(STEPS)]
        return Whole(losses, worker.finish().digest)


def _run(
    processes: ForkServerContext,
    folder: Path,
    name: str,
    kill: Kill | None = None,
    after: float | None = None,
    device: str = "cpu",
) -> bool:
    """Whether the run came to its end; `after`: the seconds after which it is killed."""
    process = processes.Process(target=train, args=(folder, name, kill, device), daemon=True)
    process.start()
    process.join(after)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode in (0, -9), "the run failed by itself"
    return process.exitcode == 0


def _check(folder: Path, whole: Whole) -> None:
    """Every step that was ever run, also those that were run again, had its loss."""
    assert (folder / "digest").read_text() == whole.digest
    lines = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    assert {step for step, _ in lines} == set(range(1, STEPS + 1))
    assert [loss for _, loss in lines] == [whole.losses[step - 1] for step, _ in lines]


@pytest.mark.parametrize("place", PLACES)
def test_killed_in(processes: ForkServerContext, tmp_path: Path, whole: Whole, place: str) -> None:
    """Twice in the same kind of place, then once more to the end."""
    random = Random(place)
    for number in (random.randint(1, 4), random.randint(1, 40)):
        _run(processes, tmp_path, "nvme", Kill(place, number))
    assert _run(processes, tmp_path, "gpu")
    assert place in (tmp_path / "kills").read_text()
    _check(tmp_path, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_killed_on_a_gpu(processes: ForkServerContext, tmp_path: Path, name: str) -> None:
    """The CPU's update and the GPU's round otherwise, so a run goes on under its own plan."""
    with running(plan_of(name, "cuda")) as (worker, _):
        losses = [worker.step().loss for _ in range(STEPS)]
        whole = Whole(losses, worker.finish().digest)
    for number in (3, 20):
        _run(processes, tmp_path, name, Kill("a file of a checkpoint", number), device="cuda")
    assert _run(processes, tmp_path, name, device="cuda")
    assert "a file of a checkpoint" in (tmp_path / "kills").read_text()
    _check(tmp_path, whole)


def test_killed_at_random_instants(
    processes: ForkServerContext, tmp_path: Path, whole: Whole
) -> None:
    random, started, runs, ends = Random(0), time.monotonic(), 0, 0
    folder = tmp_path / "0"
    folder.mkdir()
    while time.monotonic() - started < SECONDS or not ends:
        late = time.monotonic() - started > SECONDS
        after = None if late else random.uniform(0.05, 1.5)
        runs += 1
        if _run(processes, folder, random.choice(NAMES), after=after):
            _check(folder, whole)
            ends += 1
            folder = tmp_path / str(ends)
            folder.mkdir()
    assert runs > ends
