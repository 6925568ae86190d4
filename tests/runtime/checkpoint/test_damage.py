"""What is wrong with a checkpoint, or with the disk under it, is told; the good one stays good."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from bigplan.errors import BigplanError, CheckpointError, InputError
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.program import Action
from bigplan.runtime.checkpoint import latest
from bigplan.runtime.checkpoint.saver import Saver
from bigplan.runtime.manifest import NAME, _digest, read_manifest, write_manifest
from bigplan.spec.optimizer import Optimizer
from tests.runtime.checkpoints import away, course, passing, resident, running
from tests.runtime.plans import tiny_model

Damage = Callable[[Path, Random], None]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("good")
    with running(away(Tier.NVME)) as (worker, _):
        for _ in range(2):
            worker.step()
            worker.save(folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    return Path(shutil.copytree(good, tmp_path / "checkpoints"))


def _resume(plan: Plan, path: Path) -> None:
    with running(plan, path):
        pass


def _flip(path: Path, random: Random) -> None:
    """One bit somewhere in the tensors of some file."""
    manifest = read_manifest(path)
    file = random.choice(manifest.files)
    extent = random.choice(file.extents[1:])
    with (path / file.name).open("r+b") as stored:
        at = extent.offset + random.randrange(extent.nbytes)
        stored.seek(at)
        byte = stored.read(1)[0] ^ (1 << random.randrange(8))
        stored.seek(at)
        stored.write(bytes([byte]))


def _truncate(path: Path, random: Random) -> None:
    file = random.choice(read_manifest(path).files)
    os.truncate(path / file.name, random.randrange(file.nbytes))


def _remove(path: Path, random: Random) -> None:
    (path / random.choice(read_manifest(path).files).name).unlink()


def _remove_manifest(path: Path, _: Random) -> None:
    (path / NAME).unlink()


def _garble_manifest(path: Path, random: Random) -> None:
    data = bytearray((path / NAME).read_bytes())
    at = random.randrange(len(data))
    data[at] ^= 1 << random.randrange(8)
    (path / NAME).write_bytes(data)


def _newer(path: Path, _: Random) -> None:
    data = json.loads((path / NAME).read_text())
    (path / NAME).write_text(json.dumps(data | {"format": 99}))


def _forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """As somebody does who knows how the manifest's digest is made."""
    data = json.loads((path / NAME).read_text())
    change(data["checkpoint"])
    (path / NAME).write_text(json.dumps(data | {"sha256": _digest(data["checkpoint"])}))


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"shape": [10**7, 10**7]}, "that its model has not"),
        ({"first_row": 3, "last_row": 2}, "that its model has not"),
        ({"last_column": 10**9}, "that its model has not"),
        ({"parameter": "made.up"}, "a part of 'made.up'"),
        ({"offset": -4096}, "has nothing"),
        ({"offset": 2**50}, "has nothing"),
    ],
)
def test_a_manifest_that_cannot_be_is_not_obeyed(
    folder: Path, part: dict[str, object], what: str
) -> None:
    """Memory of such a size would be taken, and bytes looked for without end."""
    _forge(folder / "step-000002", lambda made: made["files"][0]["tensors"][0].update(part))
    with pytest.raises(CheckpointError, match=what):
        read_manifest(folder / "step-000002")


@pytest.mark.parametrize(
    "extent", [{"nbytes": 2**50}, {"nbytes": -5}, {"offset": -4096}, {"checksums": []}]
)
def test_extents_of_a_manifest_are_those_of_a_file(folder: Path, extent: dict[str, object]) -> None:
    _forge(folder / "step-000002", lambda made: made["files"][0]["extents"][-1].update(extent))
    with pytest.raises(CheckpointError, match="as no file is"):
        read_manifest(folder / "step-000002")


@pytest.mark.parametrize("name", ["../step-000001/{}", "{parent}/step-000001/{}", ".{}", ""])
def test_a_manifest_names_files_of_its_folder_alone(folder: Path, name: str) -> None:
    def elsewhere(checkpoint: dict[str, Any]) -> None:
        file = checkpoint["files"][0]
        file["name"] = name.format(file["name"], parent=folder)

    _forge(folder / "step-000002", elsewhere)
    with pytest.raises(CheckpointError, match=r"manifest.json names .* is no file in it.*damaged"):
        read_manifest(folder / "step-000002")


def test_a_checkpoint_under_another_steps_name_is_not_taken_for_that_steps(folder: Path) -> None:
    moved = (folder / "step-000002").rename(folder / "step-000060")
    with pytest.raises(CheckpointError, match="is of step 2, not of its folder's name"):
        read_manifest(moved)
    assert latest(folder).path.name == "step-000001"
    assert read_manifest(moved.rename(folder / "best")).step == 2


AT_RANDOM = [
    (_flip, r"layer-.*: bytes from \d+ on .* CRC-32 differs.*resume from another"),
    (_truncate, r"layer-.* has \d+ bytes, not the \d+ that were written.*damaged"),
    (_remove, "layer-.* cannot be read .No such file.*damaged"),
    (_garble_manifest, "manifest.json.*(damaged|this version of bigplan reads)"),
]


@pytest.mark.parametrize(
    ("damage", "told", "seed"),
    [
        *((damage, told, seed) for damage, told in AT_RANDOM for seed in range(3)),
        (_remove_manifest, "manifest.json: no such file.*resume from another", 0),
        (_newer, "has format 99, this version of bigplan reads 2: .*version that wrote it", 0),
    ],
)
def test_damage_is_told_and_the_one_before_is_good(
    folder: Path, damage: Damage, told: str, seed: int
) -> None:
    damage(folder / "step-000002", Random(seed))
    with pytest.raises(CheckpointError, match=told):
        _resume(away(Tier.NVME), folder / "step-000002")
    assert course(resident(), 2, folder / "step-000001").first == 1
    if damage is not _flip:  # which is seen when the file is read
        found = latest(folder)
        assert found.path.name == "step-000001"
        assert len(found.skipped) == 1


def test_a_folder_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / "step-000004.partial").mkdir()
    with pytest.raises(
        InputError, match=r"has no checkpoint .*such as that of a run that saved some"
    ):
        _resume(resident(), tmp_path)
    with pytest.raises(InputError, match="has no checkpoint"):
        _resume(resident(), tmp_path / "nowhere")


def test_all_damaged_tells_of_each(folder: Path) -> None:
    for path in folder.iterdir():
        (path / NAME).unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*step-000002.*step-000001"):
        _resume(resident(), folder)


def _other(plan: Plan, **changes: object) -> Plan:
    training = plan.training.model_copy(update=changes)
    return plan.model_copy(update={"training": training})


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (_other(resident(), optimizer=Optimizer(name="sgd")), "another training: optimizer"),
        (_other(resident(), seed=7), "another training: seed 0 there and 7 here"),
        (_other(resident(), precision="fp32"), "precision bf16 there and fp32 here"),
        (
            resident().model_copy(update={"model": tiny_model(ffn=96)}),
            "another model: ffn 64 there and 96 here; resume with the same",
        ),
    ],
)
def test_another_training_is_told(folder: Path, plan: Plan, told: str) -> None:
    with pytest.raises(InputError, match=told):
        _resume(plan, folder)


def test_more_steps_are_the_same_training(folder: Path) -> None:
    assert course(_other(resident(), steps=50), 3, folder).first == 2


def _on(data: Path) -> Plan:
    return _other(resident(), data=str(data))


def test_data_that_moved_is_the_same_and_data_that_changed_is_not(tmp_path: Path) -> None:
    text, moved, folder = tmp_path / "text.txt", tmp_path / "moved.txt", tmp_path / "checkpoints"
    text.write_text("a text to train on, long enough for a few windows. " * 40)
    course(_on(text), 3, at=3, folder=folder)
    moved.write_bytes(text.read_bytes())
    assert course(_on(moved), 3, folder).losses == course(_on(text), 3).losses[2:]
    text.write_text(moved.read_text().replace("to train", "to learn"))
    with pytest.raises(InputError, match=r"step-000002 was trained on other data.*--data"):
        _resume(_on(text), folder)


def test_a_checkpoint_without_a_fingerprint_goes_on(folder: Path) -> None:
    """Those of before they had one."""
    path = sorted(folder.iterdir())[-1]
    manifest = read_manifest(path)
    assert manifest.data
    write_manifest(path, manifest.model_copy(update={"data": ""}))
    assert course(_other(resident(), data="bundled"), 3, folder).first == 2


def _full_disk(call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its call `number` on, `call` finds no space for files of a checkpoint."""
    real: Any = getattr(os, call)
    calls = 0

    def full(descriptor: int, *given: Any) -> Any:
        nonlocal calls
        if ".partial" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            calls += 1
            if calls >= number:
                raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, *given)

    monkeypatch.setattr(os, call, full)


@cache
def undisturbed() -> list[float]:
    """Losses of six steps; where chunks lie changes none."""
    return course(away(Tier.NVME), 6).losses


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("posix_fallocate", 1),
        ("pwritev", 7),
        ("fsync", 2),
        ("fsync", 5),
    ],
)
def test_a_full_disk_fails_the_checkpoint_and_not_the_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    plan, losses = away(Tier.NVME, chunk=5_000), undisturbed()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with running(plan, folder) as (worker, done):
        assert done == 2
        with monkeypatch.context() as patch:
            _full_disk(call, number, patch)
            results = [worker.step(), worker.step(folder)]
            results.append(worker.step())
            saved = [saved for result in results for saved in result.saved]
            assert [one.step for one in saved] == [3]
            assert "No space left on device" in saved[0].error
            assert "could not be written" in saved[0].message
            with pytest.raises(CheckpointError, match=r"step-000005 could not be written .*Free"):
                worker.save(folder)
        assert [result.loss for result in results] == losses[2:5]
        # Nothing is left of it, and those that were there are as they were.
        assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        assert worker.save(folder).name == "step-000005"  # there is space again
    assert course(plan, 6, folder).losses == losses[5:]


def test_what_dead_runs_left_behind_goes(folder: Path) -> None:
    left = folder / "step-000009.partial"
    left.mkdir()
    (left / "layer-0000.safetensors").write_text("half")
    assert latest(folder).path.name == "step-000002"
    course(away(Tier.NVME), 4, folder, at=4, folder=folder)
    assert not left.exists()
    assert sorted(p.name for p in folder.iterdir()) == [f"step-00000{n}" for n in (1, 2, 3)]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with running(resident()) as (worker, _):
        worker.step()
        with pytest.raises(CheckpointError, match="Not a directory"):
            worker.save(tmp_path / "file" / "checkpoints")
        assert worker.step(tmp_path / "file").saved[0].error


def test_all_our_errors_are_of_the_tree() -> None:
    assert issubclass(CheckpointError, BigplanError)


@pytest.mark.parametrize("make", [resident, away, passing])
def test_what_is_left_of_a_failed_checkpoint_does_no_harm(
    make: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its actions are still queued when the step that has seen the failure is over."""
    write = Saver.write

    def late(saver: Saver, action: Action) -> None:
        time.sleep(0.005)
        write(saver, action)

    monkeypatch.setattr(Saver, "write", late)
    (tmp_path / "file").touch()
    with running(make(clip_norm=None)) as (worker, _):
        results = [worker.step(tmp_path / "file") for _ in range(2)] + [worker.step()]
        worker.finish()
    errors = [saved.error for result in results for saved in result.saved]
    assert len(errors) == 2
    assert all("file" in error for error in errors)
