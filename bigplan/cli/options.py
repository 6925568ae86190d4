"""Every key of an experiment as an option, declared once and shared by the commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache

from bigplan.cli.option import OPTION, RUN
from bigplan.cli.option import option_of as _option
from bigplan.cli.plan_options import PlanOptions


@dataclass(frozen=True)
class ExperimentOptions(PlanOptions):
    """Options that override an experiment's keys; None leaves a key alone."""

    steps: str | None = _option("launch.steps", "Optimizer steps to run (default: 20).", RUN)
    address: str | None = _option(
        "launch.address", "A running Ray cluster (default: start a local Ray).", RUN
    )
    interface: str | None = _option(
        "launch.interface",
        "Network interface on which ranks of several nodes listen, such as eth0.",
        RUN,
        "NAME",
    )
    elastic: bool | None = _option(
        "launch.elastic",
        "Where a node is lost, plan for those that are left, and again when it is back.",
        RUN,
        flag="--elastic/--no-elastic",
    )
    run_dir: str | None = _option(
        "launch.run_dir", "Folder for run records (default: runs).", RUN, "DIR"
    )
    checkpoint_every: str | None = _option(
        "launch.checkpoint_every",
        "Steps between checkpoints (default: 10 minutes); 0: only at the end and on Ctrl-C.",
        RUN,
        "STEPS",
    )
    checkpoint_keep: str | None = _option(
        "launch.checkpoint_keep", "Checkpoints kept (default: 2); 0: none is written.", RUN
    )
    max_restarts: str | None = _option(
        "launch.max_restarts",
        "Starts with fresh workers where one is lost, in a row without a new step (default: "
        "3); 0: none.",
        RUN,
    )
    max_skipped: str | None = _option(
        "launch.max_skipped",
        "Steps in a row with infinite or NaN gradients after which a run ends (default: 10; "
        "those in which fp16's loss scale falls do not count); 0: never.",
        RUN,
    )
    tensorboard: bool | None = _option(
        "launch.tensorboard",
        "Write event files (default: yes).",
        RUN,
        flag="--tensorboard/--no-tensorboard",
    )
    wandb: str | None = _option(
        "launch.wandb", "Project of Weights & Biases that gets the metrics too.", RUN, "NAME"
    )


_MADE = {field.name: field.metadata for field in fields(ExperimentOptions) if field.metadata}


@cache
def keys() -> Mapping[str, str]:
    """The dotted key of an experiment for every option that has one."""
    return {name: made["key"] for name, made in _MADE.items()}


@cache
def flags() -> Mapping[str, str]:
    """The option, as it is typed, of every dotted key of an experiment that has one."""
    return {made["key"]: made[OPTION].default.partition("/")[0] for made in _MADE.values()}


@cache
def numbers() -> frozenset[str]:
    """The options whose text is read as a number, as in a file."""
    return frozenset(name for name, made in _MADE.items() if made["number"])


@cache
def lists() -> frozenset[str]:
    """The options whose text is a list of words with commas between them."""
    return frozenset(name for name, made in _MADE.items() if made["many"])
