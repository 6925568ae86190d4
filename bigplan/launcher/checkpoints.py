"""A run's checkpoints: where they lie, when the next is due, how many stay, what space they take.

checkpoints/step-000123 is the state after step 123. A name with an ending is no checkpoint:
.partial is being written, .old is being removed, .damaged could not be read.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bigplan.errors import PreflightError
from bigplan.graph.build import build_graph
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.spec.experiment import LaunchSpec
from bigplan.spec.lora import trained_count
from bigplan.units import format_bytes

FOLDER = "checkpoints"
BEYOND = 2  # more than are kept are there at once, at worst
SECONDS = 600.0  # between checkpoints where nobody says: at most ten minutes are lost
_NAME = re.compile(r"step-(\d+)")


def checkpoints(run: Path) -> tuple[Path, ...]:
    """The run's complete checkpoints, oldest first."""
    folder = run / FOLDER
    inside = folder.iterdir() if folder.is_dir() else ()
    return tuple(sorted((path for path in inside if _NAME.fullmatch(path.name)), key=step_of))


def step_of(checkpoint: Path) -> int:
    """The step whose state a checkpoint holds."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def newest_step(run: Path) -> int | None:
    """The step of the newest complete checkpoint."""
    return max(map(step_of, checkpoints(run)), default=None)


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest `keep`."""
    found = checkpoints(run)
    for path in found[: max(0, len(found) - keep)]:
        remove(path)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; killed half-way it is no checkpoint any more."""
    going = checkpoint.with_name(f"{checkpoint.name}.old")
    shutil.rmtree(going, ignore_errors=True)
    checkpoint.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def set_aside(checkpoint: Path) -> Path:
    """Keep a damaged checkpoint where the run does not take it for a good one; its new place."""
    aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    return checkpoint.rename(aside)


def sweep(run: Path) -> None:
    """Delete what a killed run was writing or removing."""
    folder = run / FOLDER
    for pattern in ("step-*.partial", "step-*.old"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


@dataclass
class Pace:
    """When a checkpoint is due: every so many steps (0: never), or every ten minutes.

    The clock decides, not the predicted step: a wrong prediction must not cost hours of work.
    """

    every: int | None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._last = self.clock()

    def due(self, done: int) -> bool:
        """Whether the state after `done` steps is to be written."""
        if self.every is not None:
            return self.every > 0 and done % self.every == 0
        return self.clock() - self._last >= SECONDS

    def taken(self) -> None:
        """A checkpoint was just asked for."""
        self._last = self.clock()


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of one checkpoint: 12 a parameter with AdamW in fp32 (weights and two moments).

    Of adapters theirs alone. With Muon they are 8 for matrices, which have one.
    """
    graph = build_graph(plan.model, plan.training, plan.strategy)
    sizes = graph.sizes
    each = sizes.stored if sizes.master else sizes.parameter + sizes.stored
    seconds = sizes.second * sum(graph.kinds[name].others for name in graph.layers)
    return round(trained_count(plan.model, plan.training.lora) * each) + seconds


def more_at_once(run: Path, plan: Plan, how: LaunchSpec) -> int:
    """How many checkpoints more than now a launch has on the disk at its worst moment.

    It has two more than it keeps, if it writes that many: one whose weights no loss has yet shown
    to be good, and the next one. Both are there before an old one goes.
    """
    keep, every, target = how.checkpoint_keep, how.checkpoint_every, how.steps
    assert target is not None, "a launch knows its steps"
    steps = target - (newest_step(run) or 0)
    if keep == 0 or steps == 0:
        return 0
    if every is None:
        written = int(steps * plan.predicted.step_seconds_high / SECONDS) + 1
    else:
        written = 1 if every == 0 else -(-steps // every)
    return min(written, max(1, keep + BEYOND - len(checkpoints(run))))


def require_space(run: Path, plan: Plan, scratch: Path, number: int) -> None:
    """Raise PreflightError where `number` checkpoints do not fit the drive beside what is there.

    Tensors that the plan offloads count too where they lie on the same drive.
    """
    each = checkpoint_bytes(plan)
    needed = each * number
    offloaded = 0
    if _drive(scratch) == _drive(run):
        offloaded = sum(u.used_bytes for u in plan.predicted.memory if u.tier is Tier.NVME)
    free = shutil.disk_usage(run).free
    if needed and needed + offloaded > free:
        beside = f" beside {format_bytes(offloaded)} of offloaded tensors" if offloaded else ""
        fewer = "none: --checkpoint-keep 0"
        with_one = 1 + BEYOND
        if with_one < number and with_one * each + offloaded <= free:
            fewer = "fewer: --checkpoint-keep 1, or 0 for none"
        raise PreflightError(
            f"checkpoints of {format_bytes(each)} each, {number} more at once, need "
            f"{format_bytes(needed)}{beside} at {run.parent}, and {format_bytes(free)} is free; "
            f"free some, use --run-dir on a larger drive, or keep {fewer}"
        )


def _drive(path: Path) -> int:
    """The file system of a path that may not exist yet."""
    while not path.exists():
        path = path.parent
    return path.stat().st_dev
