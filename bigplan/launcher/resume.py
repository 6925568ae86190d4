"""A run that can go on: its folder read, and a plan held against the one it ran with."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigplan.errors import InputError, RefusedError
from bigplan.launcher.checkpoints import newest_step
from bigplan.launcher.record import (
    LAUNCH,
    PLAN,
    SUMMARY,
    Asked,
    read_asked,
    read_launch,
    read_summary,
)
from bigplan.paths import exists, is_dir, is_file
from bigplan.plan import Plan, digest, load_plan
from bigplan.spec.experiment import LaunchSpec
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import FREE_IN_A_RUN, Training
from bigplan.units import be, counted

# What is named in place of a run, by a file that it has, and what to do.
_MEANT = {
    "config.json": (
        "a Hugging Face folder; name the run that it was exported from, or plan one that starts "
        "from its weights (--weights)"
    ),
    "adapter_config.json": (
        "a folder of adapters; name the run that it was exported from, or plan one that starts "
        "from them (--lora-weights)"
    ),
    "manifest.json": "a checkpoint; name the folder of the run whose `checkpoints` it is in",
}


@dataclass(frozen=True)
class Resumable:
    """A run's folder, the plan it ran with last, how it was launched and what was asked for."""

    folder: Path
    plan: Plan
    how: LaunchSpec
    asked: Asked | None = None


def read_resumable(folder: Path) -> Resumable:
    """Read a run's folder. Raises InputError where it is none, or older than checkpoints."""
    if not is_file(folder / PLAN):
        raise _no_run(folder)
    if not is_file(folder / LAUNCH):
        raise InputError(
            f"{folder} was written by a version of bigplan without checkpoints (it has no "
            f"{LAUNCH}), so nothing can be resumed; launch {folder / PLAN} instead"
        )
    return Resumable(folder, load_plan(folder / PLAN), read_launch(folder), read_asked(folder))


def _no_run(folder: Path) -> InputError:
    told = f"{folder} holds no {PLAN}, so it is no run of `bigplan launch`"
    for name, meant in _MEANT.items():
        if is_file(folder / name):
            return InputError(f"{told} but {meant}")
    return InputError(f"{told}; name a folder such as runs/my-model-1")


def refuse_other_training(before: Plan, model: ModelSpec, training: Training) -> None:
    """Raise RefusedError where this is another model, or trained otherwise, than `before`."""
    free = {*FREE_IN_A_RUN, "optimizer.moments"}  # which a checkpoint's are converted to
    if not (_steps_matter(before.training) or _steps_matter(training)):
        free.add("steps")
    if training.lora is not None and None not in (before.training.weights, training.weights):
        free.add("weights")  # its place: a checkpoint knows the content of frozen weights
    for what, now in (("model", model), ("training", training)):
        old, new = (one.model_dump(mode="json") for one in (getattr(before, what), now))
        changes = [text for key, text in _changes(old, new) if not {key, _part(key)} & free]
        if changes:
            raise RefusedError(
                f"this run cannot be resumed with that {what}: {'; '.join(changes)}. Another plan "
                "may change where tensors live and on how many devices, not what is computed; "
                "launch a new run for it, which may start from what `bigplan export` writes of "
                "this one"
            )


def decaying_until(plan: Plan, steps: int) -> Plan:
    """The plan for a new run of so many steps: a rate that decays over all does so over these."""
    training = plan.training
    if not _steps_matter(training) or steps <= training.steps:
        return plan  # a run that stops early can go on with the same rates
    longer = training.model_copy(update={"steps": steps})
    inputs = {**plan.inputs, "training": digest(longer)}
    return plan.model_copy(update={"training": longer, "inputs": inputs})


def refuse_done(folder: Path, target: int) -> None:
    """Raise InputError where nothing is left to do.

    A launch that was killed after its last step has still to close the run's record.
    """
    done = newest_step(folder) or 0
    closed = exists(folder / SUMMARY) and read_summary(folder).status == "finished"
    if done > target or (done == target and closed):
        raise InputError(
            f"{shown(folder)} has done {counted(done, 'step')}, and {target} {be(target)} "
            f"asked for; --steps N with N above {done} goes on"
        )


def refuse_without_rate(training: Training, steps: int) -> None:
    """Raise RefusedError where a run that goes on would have steps that change nothing."""
    if _steps_matter(training) and steps > training.steps and not training.schedule.final_fraction:
        raise RefusedError(
            f"{counted(steps, 'step')} {be(steps)} asked for, and the learning rate of this run "
            f"has decayed to 0 after {training.steps}; launch a new run for more"
        )


def _steps_matter(training: Training) -> bool:
    """Whether the learning rate depends on the number of steps."""
    schedule = training.schedule
    return schedule.name != "constant" and schedule.decay_steps is None


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Dotted keys whose values differ, each with both."""
    for key in dict.fromkeys((*old, *new)):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            for inner, text in _changes(before, after):
                yield f"{key}.{inner}", f"{key}.{text}"
        elif before != after:
            yield key, f"{key} was {_written(before)} and is {_written(after)}"


def _part(key: str) -> str:
    return key.partition(".")[0]


def _written(value: object) -> str:
    """A value as a description has it: null, true, {rank: 4}."""
    return json.dumps(value, ensure_ascii=False).replace('"', "")


def resume_hint(folder: Path) -> str:
    """What to do to go on with a run."""
    if not is_dir(folder):
        return "Nothing of the run is left: launch it again"
    newest = newest_step(folder)
    command = f"bigplan launch --resume {shlex.quote(shown(folder))}"
    if newest is None:
        return f"No checkpoint was written yet. Start it again with: {command}"
    return f"The newest checkpoint is of step {newest}. Go on with: {command}"


def shown(path: Path) -> str:
    """A path as the user would write it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
