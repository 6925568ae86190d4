"""Processes that write checkpoints under any layout, and go on from any other's."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bigplan.graph.strategy import Strategy
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.plan import Plan
from tests.runtime.checkpoints import Course, course
from tests.runtime.execution.streamed import streamed_kind
from tests.runtime.plans import SHORT, placed, plan_of, tiny_model, tiny_training
from tests.runtime.reference import INACTIVE
from tests.toys import kind_placement

WORLD, STEPS, AT = 2, 4, 3
# Name, ZeRO stage and pipeline stages.
LAYOUTS = (("z1", 1, 1), ("z2", 2, 1), ("pp2", 0, 2), ("z3", 3, 1), ("z0", 0, 1))
# By number of ranks: of those that split layers or sequences, whose sums have another order than
# one process's. Each goes on from the one before and writes a step later. What ranks of any layout
# read of any other's is in test_split.py.
SPLIT = {
    2: (
        ("tp2", Strategy(dp=1, tp=2)),
        ("cp2-z3", Strategy(dp=1, cp=2, zero=3)),
    ),
    4: (
        ("tp2-pp2", Strategy(dp=1, tp=2, pp=2)),
        ("tp2-z3", Strategy(dp=2, tp=2, zero=3)),
        ("groups-z3", Strategy(dp=2, cp=2, zero=3, zero_group=2)),
        ("groups-z1", Strategy(dp=2, cp=2, zero=1, zero_group=2)),
    ),
}


def _rows_everywhere(layers: int) -> KindPlacement:
    return KindPlacement(
        layers=layers,
        parameters={Tier.GPU: layers},
        gradients={Tier.GPU: layers},
        activations=kind_placement(layers).activations,
        optimizer={Tier.GPU: 0.5, Tier.HOST: 0.75, Tier.NVME: layers - 1.25},
    )


def _shared_out(zero: int, layers: int) -> KindPlacement:
    """What ZeRO shares out leaves the GPU; state is everywhere."""
    here, away = {Tier.GPU: layers}, {Tier.GPU: 1, Tier.HOST: 1, Tier.NVME: layers - 2}
    if layers < 3:
        away = here
    changes = {
        "parameters": away if zero == 3 else here,
        "gradients": away if zero >= 2 else here,
        "optimizer": {Tier.GPU: 0.25, Tier.HOST: 0.5, Tier.NVME: layers - 0.75},
        "streamed": 0.25,
    }
    return kind_placement(layers).model_copy(update=changes)


def plan_for(ranks: int, zero: int = 0, clip_norm: float = 0.5, pp: int = 1) -> Plan:
    """The same two micro-batches a step on one rank or two: either way their sum is a + b.

    Under ZeRO the norm is summed in another order, so bits are the same where nothing is clipped.
    """
    return plan_of_layout(Strategy(dp=ranks // pp, zero=zero, pp=pp), clip_norm)


def plan_of_layout(strategy: Strategy, clip_norm: float = INACTIVE) -> Plan:
    """The same training under any layout."""
    zero, pp = strategy.zero, strategy.pp
    streamed = streamed_kind(Tier.GPU, Tier.GPU, 1.5, layers=3)
    spread = _rows_everywhere(3) if strategy.ranks == 1 else streamed
    if zero:
        spread = _shared_out(zero, 3)
    placement: Placement = placed(
        chunk=SHORT,
        embedding=kind_placement(1, optimizer=Tier.NVME),
        block=spread,
        head=kind_placement(1, optimizer=Tier.HOST),
    )
    # In fp32 there is no master copy: ranks that have all parameters write a part of them each.
    precision = "fp32" if clip_norm == INACTIVE else "bf16"
    training = tiny_training(2, clip_norm=clip_norm, precision=precision)
    if pp > 1:
        first, last = (
            StagePlacement(kinds={**placement.stages[0].kinds, "block": _shared_out(0, blocks)})
            for blocks in (2, 1)
        )
        placement = placement.model_copy(
            update={"stages": (_without(first, "head"), _without(last, "embedding"))}
        )
    return plan_of(tiny_model(layers=3), training, strategy, placement)


def _without(stage: StagePlacement, kind: str) -> StagePlacement:
    return StagePlacement(kinds={name: at for name, at in stage.kinds.items() if name != kind})


def play_split(rank: int, path: Path, ranks: int, before: str) -> None:
    """These courses of so many ranks, the first from the checkpoint called `before`."""
    for number, (name, strategy) in enumerate(SPLIT[ranks]):
        played = course(
            plan_of_layout(strategy),
            until := AT + 1 + number,
            path / before,
            at=until,
            folder=path / name,
            rank=rank,
            meeting=path / f"{name}.meeting",
        )
        torch.save(played, _result(path, name, rank))
        before = name


def run_four(rank: int, folder: str) -> None:
    """One process of four."""
    torch.set_num_threads(1)
    play_split(rank, Path(folder), 4, "unclipped")


def run_rank(rank: int, folder: str) -> None:
    """One process: all courses, each left in the folder as a file."""
    torch.set_num_threads(1)
    path = Path(folder)

    def play(name: str, plan: Plan | None = None, **how: Any) -> None:
        meeting = path / f"{name}.meeting"
        played = course(plan or plan_for(WORLD), STEPS, rank=rank, meeting=meeting, **how)
        torch.save(played, _result(path, name, rank))

    def unpickled(*arguments: Any) -> None:
        raise AssertionError("one rank ran what another sent")

    with mock.patch("torch.distributed.distributed_c10d._tensor_to_object", unpickled):
        play("whole", at=AT, folder=path / "two")
    play("rest", resume=path / "one")
    before = "unclipped"
    # Each goes on from the layout before, and the first from one process.
    for name, zero, pp in LAYOUTS:
        plan = plan_for(WORLD, zero, INACTIVE, pp)
        play(name, plan, resume=path / before, at=AT, folder=path / name)
        before = name
    play_split(rank, path, WORLD, before)
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
