"""One process goes on where two stopped, and two where one did."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.multiprocessing.spawn import spawn

from bigplan.runtime.checkpoint import latest
from tests.runtime.checkpoint_ranks import AT, STEPS, WORLD, plan_for, played, run_rank
from tests.runtime.checkpoints import Course, course
from tests.runtime.harness import same


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process has left a checkpoint, then two have run from it and from the start."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("ranks")
    course(plan_for(1), STEPS, at=AT, folder=path / "one")
    spawn(run_rank, (str(path),), nprocs=WORLD)  # type: ignore[no-untyped-call]
    return path


@pytest.fixture(scope="module")
def whole() -> Course:
    """All steps in one process."""
    return course(plan_for(1), STEPS)


def test_two_ranks_alone_do_what_one_does(folder: Path, whole: Course) -> None:
    for rank in range(WORLD):
        assert played(folder, "whole", rank).losses == whole.losses


@pytest.mark.parametrize("rank", range(WORLD))
def test_two_go_on_where_one_stopped(folder: Path, whole: Course, rank: int) -> None:
    rest = played(folder, "rest", rank)
    assert (rest.first, rest.losses) == (AT - 1, whole.losses[AT - 1 :])
    same("last state", whole.state, rest.state)


def test_one_goes_on_where_two_stopped(folder: Path, whole: Course) -> None:
    rest = course(plan_for(1), STEPS, folder / "two")
    assert (rest.first, rest.losses) == (AT - 1, whole.losses[AT - 1 :])
    same("last state", whole.state, rest.state)


def test_the_ranks_shared_the_writing(folder: Path) -> None:
    found = latest(folder / "two")
    names = {path.name for path in found.path.iterdir()}
    assert names == {"manifest.json", *(f"layer-{n:04d}.safetensors" for n in range(5))}
    assert [file.layer for file in found.manifest.files] == list(range(5))
    (saved,) = played(folder, "whole", 0).saved
    assert saved.path == found.path
    assert not saved.error
    assert played(folder, "whole", 1).saved == ()


def test_what_fails_on_one_rank_is_told_by_the_first(folder: Path, whole: Course) -> None:
    course_of = [played(folder, "full", rank) for rank in range(WORLD)]
    assert [one.losses for one in course_of] == [whole.losses] * WORLD
    (saved,) = course_of[0].saved
    assert "No space left on device" in saved.error
    assert list((folder / "full").iterdir()) == []
