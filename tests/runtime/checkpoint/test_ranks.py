"""One process goes on where several stopped, and several where one did."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from bigplan.graph.strategy import Strategy
from bigplan.runtime.checkpoint import latest
from tests.runtime.checkpoint.ranks import (
    AT,
    LAYOUTS,
    SPLIT,
    STEPS,
    WORLD,
    plan_for,
    plan_of_layout,
    played,
    run_four,
    run_rank,
)
from tests.runtime.checkpoints import Course, course
from tests.runtime.harness import joined, same
from tests.runtime.processes import start
from tests.runtime.reference import INACTIVE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process has left a checkpoint, then two have run from it and from the start."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("ranks")
    course(plan_for(1), STEPS, at=AT, folder=path / "one")
    course(plan_for(1, clip_norm=INACTIVE), STEPS, at=AT, folder=path / "unclipped")
    start(run_rank, path, WORLD)
    start(run_four, path, 4)
    return path


@pytest.fixture(scope="module")
def whole() -> Course:
    """All steps in one process."""
    return course(plan_for(1), STEPS)


def test_two_ranks_alone_do_what_one_does(folder: Path, whole: Course) -> None:
    for rank in range(WORLD):
        assert played(folder, "whole", rank).losses == whole.losses


@pytest.fixture(scope="module")
def unclipped() -> Course:
    """The same, with norms that are computed and clip nothing."""
    return course(plan_for(1, clip_norm=INACTIVE), STEPS)


@pytest.mark.parametrize("rank", range(WORLD))
def test_two_go_on_where_one_stopped(folder: Path, whole: Course, rank: int) -> None:
    rest = played(folder, "rest", rank)
    assert (rest.first, rest.losses) == (AT - 1, whole.losses[AT - 1 :])
    same("last state", whole.state, rest.state)


def test_one_goes_on_where_two_stopped(folder: Path, whole: Course) -> None:
    rest = course(plan_for(1), STEPS, folder / "two")
    assert (rest.first, rest.losses) == (AT - 1, whole.losses[AT - 1 :])
    same("last state", whole.state, rest.state)


@pytest.mark.parametrize("name", [name for name, *_ in LAYOUTS])
def test_any_layout_goes_on_where_another_stopped(
    folder: Path, unclipped: Course, name: str
) -> None:
    first, second = (played(folder, name, rank) for rank in range(WORLD))
    assert (first.first, first.losses) == (AT - 1, unclipped.losses[AT - 1 :])
    assert second.losses == first.losses
    state = tuple(joined(layers) for layers in zip(first.state, second.state, strict=True))
    same("last state", unclipped.state, state)


@pytest.mark.parametrize("name", [name for name, *_ in LAYOUTS])
def test_one_goes_on_where_any_layout_stopped(folder: Path, unclipped: Course, name: str) -> None:
    rest = course(plan_for(1, clip_norm=INACTIVE), STEPS, folder / name)
    assert (rest.first, rest.losses) == (AT - 1, unclipped.losses[AT - 1 :])
    same("last state", unclipped.state, rest.state)


ROUNDING = 1e-6  # of a loss whose sums have another order, relative: 17 unit roundoffs of fp32
SPLITS = [(ranks, n) for ranks, layouts in SPLIT.items() for n in range(len(layouts))]


@pytest.mark.parametrize(("ranks", "number"), SPLITS)
def test_ranks_that_split_layers_go_on_from_any_layout_and_one_from_them(
    folder: Path, ranks: int, number: int
) -> None:
    name = SPLIT[ranks][number][0]
    before = SPLIT[ranks][number - 1][0] if number else {2: LAYOUTS[-1][0], 4: "unclipped"}[ranks]
    courses = [played(folder, name, rank) for rank in range(ranks)]
    alone = course(plan_of_layout(Strategy(dp=1)), AT + number, folder / before)
    begun = tuple(joined(layers) for layers in zip(*(c.begun for c in courses), strict=True))
    assert {c.first for c in courses} == {alone.first} == {AT - 1 + number}
    same("first state", alone.begun, begun)
    assert {c.digest for c in courses} == {alone.digest}
    for one in courses:
        assert one.losses[0] == pytest.approx(alone.losses[0], rel=ROUNDING)
    after = course(plan_of_layout(Strategy(dp=1)), 0, folder / name)
    written = tuple(joined(layers) for layers in zip(*(c.written for c in courses), strict=True))
    assert after.first == AT + number
    same("what they wrote", written, after.begun)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_no_rank_wrote_more_than_its_part(folder: Path, zero: int) -> None:
    manifest = latest(folder / f"z{zero}").manifest
    parameters = plan_for(1).model.parameter_count
    written = [
        sum(t.rectangle.elements for f in manifest.files if rank in f.name for t in f.tensors)
        for rank in ("rank-0000", "rank-0001")
    ]
    assert sum(written) == 3 * parameters  # two moments, and parameters in fp32
    assert max(written) - min(written) < 3 * 64 * 5  # of each layer the last part is not filled


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
