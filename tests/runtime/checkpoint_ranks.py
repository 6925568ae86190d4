"""Two processes that write one checkpoint, and go on from one of a single process."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bigplan.graph.strategy import Strategy
from bigplan.placement import KindPlacement, Placement, Tier
from bigplan.plan import Plan
from tests.runtime.checkpoints import Course, course
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.runtime.streamed import streamed_kind
from tests.toys import kind_placement

WORLD, STEPS, AT = 2, 5, 3


def _rows_everywhere(layers: int) -> KindPlacement:
    return KindPlacement(
        layers=layers,
        parameters={Tier.GPU: layers},
        gradients={Tier.GPU: layers},
        activations=kind_placement(layers).activations,
        optimizer={Tier.GPU: 0.5, Tier.HOST: 0.75, Tier.NVME: layers - 1.25},
    )


def plan_for(ranks: int) -> Plan:
    """The same two micro-batches a step on one rank or two: either way their sum is a + b."""
    streamed = streamed_kind(Tier.GPU, Tier.GPU, 1.5, layers=3)
    spread = _rows_everywhere(3) if ranks == 1 else streamed
    placement: Placement = placed(
        chunk=5_000,
        embedding=kind_placement(1, optimizer=Tier.NVME),
        block=spread,
        head=kind_placement(1, optimizer=Tier.HOST),
    )
    training = tiny_training(2, clip_norm=0.5, precision="bf16")
    return plan_of(tiny_model(layers=3), training, Strategy(dp=ranks), placement)


def run_rank(rank: int, folder: str) -> None:
    """One process: all courses, each left in the folder as a file."""
    torch.set_num_threads(1)
    path, plan = Path(folder), plan_for(WORLD)

    def play(name: str, **how: Any) -> None:
        meeting = path / f"{name}.meeting"
        played = course(plan, STEPS, rank=rank, meeting=meeting, **how)
        torch.save(played, _result(path, name, rank))

    def unpickled(*arguments: Any) -> None:
        raise AssertionError("one rank ran what another sent")

    with mock.patch("torch.distributed.distributed_c10d._tensor_to_object", unpickled):
        play("whole", at=AT, folder=path / "two")
    play("rest", resume=path / "one")
    real = os.pwritev

    def full(descriptor: int, *given: Any) -> int:
        if rank == 1 and ".partial" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, *given)

    with mock.patch("os.pwritev", full):
        play("full", at=AT, folder=path / "full")


def played(folder: Path, name: str, rank: int) -> Course:
    """What a rank left."""
    found = torch.load(_result(folder, name, rank), weights_only=False)  # our own file
    assert isinstance(found, Course)
    return found


def _result(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.{rank}.pt"
