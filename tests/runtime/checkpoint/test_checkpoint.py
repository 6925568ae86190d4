"""A run that stops and goes on, under any plan, computes what one without a stop does."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.runtime.checkpoint import Reader, latest, writing
from bigplan.runtime.manifest import read_manifest
from tests.examples import examples
from tests.runtime.checkpoints import away, course, pairs, passing, resident, running
from tests.runtime.harness import same, state_of

STEPS = 5


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@given(pairs(), st.integers(1, STEPS - 1), st.booleans())
@settings(
    max_examples=examples(12),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_plan_goes_on_from_any_plans_checkpoint(
    both: tuple[Plan, Plan], at: int, stopped: bool
) -> None:
    """Bit by bit: the losses, and in the end weights and moments."""
    plan, other = both
    whole = course(plan, STEPS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if stopped:
            with running(plan) as (worker, _):
                for _ in range(at):
                    worker.step()
                assert worker.save(folder).name == f"step-{at:06d}"
        else:
            assert course(plan, STEPS, at=at, folder=folder).losses == whole.losses
        rest = course(other, STEPS, folder)
    assert rest.first in (at - 1, at)
    assert rest.losses == whole.losses[rest.first :]
    same("last state", whole.state, rest.state)


@pytest.mark.parametrize(("clip_norm", "precision"), [(None, "fp32"), (0.5, "bf16")])
def test_files_are_safetensors_with_the_rows_they_name(
    tmp_path: Path, clip_norm: float | None, precision: str
) -> None:
    plan = away(Tier.NVME, chunk=5_000, clip_norm=clip_norm, precision=precision)
    with running(plan) as (worker, _):
        worker.step()
        path = worker.save(tmp_path)
        state = state_of(worker)
    manifest = read_manifest(path)
    for file in manifest.files:
        tensors = load_file(path / file.name)
        padding = [name for name in tensors if name.startswith("padding")]
        assert len(tensors) - len(padding) == len(file.tensors)
        assert (
            sum(tensor.nbytes for tensor in tensors.values())
            == file.nbytes - file.extents[0].nbytes
        )
    titles = load_file(path / manifest.files[1].name)
    kind = "weights" if precision == "fp32" else "master"
    rows = [
        titles[name]
        for name in sorted(titles)
        if name.startswith(f"layers.0.q_proj.weight/{kind}/")
    ]
    with Reader(path, manifest) as reader:
        q_proj = reader.parameter(1, "q_proj.weight")
        whole = torch.cat(
            [reader.parameter(1, p.name).flatten() for p in plan.model.kinds()["block"]]
        )
    assert torch.equal(torch.cat(rows).sort()[0], q_proj.sort()[0])
    assert torch.equal(whole, state[1].weights)


def test_training_goes_on_after_save_as_if_nothing_had_been(tmp_path: Path) -> None:
    plan = away()
    whole = course(plan, STEPS)
    with running(plan) as (worker, _):
        losses = [worker.step().loss, worker.step().loss]
        worker.save(tmp_path)
        worker.save(tmp_path)  # it is there already
        shutil.rmtree(tmp_path / "step-000002")
        assert worker.save(tmp_path).is_dir()  # it was removed since
        # The step after a save has no updates of its own to follow.
        third = worker.step(tmp_path)
        losses += [third.loss, worker.step(tmp_path).loss, worker.step(tmp_path).loss]
        worker.finish()
        same("last state", whole.state, state_of(worker))
    assert losses == whole.losses
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-00000{n}" for n in (2, 3, 4)]
    for path in tmp_path.iterdir():
        rest = course(resident(), STEPS, path)
        assert rest.losses == whole.losses[rest.first :]
        same(path.name, whole.state, rest.state)


@pytest.mark.parametrize(
    ("plan", "clip_norm"),
    [
        *((plan, 0.5) for plan in (away(Tier.NVME, chunk=5_000), passing())),
        *((plan, None) for plan in (away(), resident())),
    ],
)
def test_a_checkpoint_outlasts_its_step_and_the_next_updates_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan, clip_norm: float | None
) -> None:
    training = plan.training.model_copy(update={"clip_norm": clip_norm})
    plan = plan.model_copy(update={"training": training})
    whole = course(plan, STEPS)
    write, over = writing.FileWriter._chunk, threading.Event()

    def late(self: writing.FileWriter, offset: int, view: memoryview, nbytes: int) -> list[int]:
        """Not before the step that began the checkpoint is over."""
        assert over.wait(100)
        return write(self, offset, view, nbytes)

    monkeypatch.setattr(writing.FileWriter, "_chunk", late)
    with running(plan) as (worker, _):
        results = [worker.step()]
        results.append(worker.step(tmp_path))
        over.set()
        results += [worker.step() for _ in range(STEPS - 2)]
        worker.finish()
        same("last state", whole.state, state_of(worker))
    assert results[1].saved == ()
    assert len(results[2].saved) == 1
    assert [result.loss for result in results] == whole.losses
    rest = course(plan, STEPS, tmp_path)
    assert rest.losses == whole.losses[rest.first :]
    same("last state of the rest", whole.state, rest.state)


def test_without_direct_transfers_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, flags: int, mode: int = 0o777, **other: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode, **other)

    real, plan = os.open, away(Tier.NVME)
    course(plan, 3, at=3, folder=tmp_path / "direct")
    monkeypatch.setattr(os, "open", refuse)
    course(plan, 3, at=3, folder=tmp_path / "buffered")
    one, two = (latest(tmp_path / name) for name in ("direct", "buffered"))
    assert one.manifest == two.manifest
    for file in one.manifest.files:
        assert (one.path / file.name).read_bytes() == (two.path / file.name).read_bytes()
    rest = course(plan, 4, two.path)
    assert (rest.first, rest.losses) == (2, course(plan, 4).losses[2:])
