"""Every key of an experiment as an option, declared once and shared by the commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

from bigplan.cli.option import RUN
from bigplan.cli.option import option_of as _option
from bigplan.cli.plan_options import PlanOptions


@dataclass(frozen=True)
class ExperimentOptions(PlanOptions):
    """Options that override an experiment's keys; None leaves a key alone."""

    steps: Annotated[
        str | None, _option("launch.steps", "Optimizer steps to run (default: 20).", RUN)
    ] = None
    address: Annotated[
        str | None,
        _option(
            "launch.address",
            "A running Ray cluster (default: start a local Ray).",
            RUN,
        ),
    ] = None
    interface: Annotated[
        str | None,
        _option(
            "launch.interface",
            "Network interface on which ranks of several nodes listen, such as eth0.",
            RUN,
            "NAME",
        ),
    ] = None
    elastic: Annotated[
        bool | None,
        _option(
            "launch.elastic",
            "Where a node is lost, plan for those that are left, and again when it is back.",
            RUN,
            flag="--elastic/--no-elastic",
        ),
    ] = None
    run_dir: Annotated[
        str | None,
        _option("launch.run_dir", "Folder for run records (default: runs).", RUN, "DIR"),
    ] = None
    checkpoint_every: Annotated[
        str | None,
        _option(
            "launch.checkpoint_every",
            "Steps between checkpoints (default: 10 minutes); 0: only at the end and on Ctrl-C.",
            RUN,
            "STEPS",
        ),
    ] = None
    checkpoint_keep: Annotated[
        str | None,
        _option(
            "launch.checkpoint_keep",
            "Checkpoints kept (default: 2); 0: none is written.",
            RUN,
        ),
    ] = None
    max_restarts: Annotated[
        str | None,
        _option(
            "launch.max_restarts",
            "Starts with fresh workers where one is lost, in a row without a new step (default: "
            "3); 0: none.",
            RUN,
        ),
    ] = None
    max_skipped: Annotated[
        str | None,
        _option(
            "launch.max_skipped",
            "Steps in a row with infinite or NaN gradients after which a run ends (default: 10; "
            "those in which fp16's loss scale falls do not count); 0: never.",
            RUN,
        ),
    ] = None
    tensorboard: Annotated[
        bool | None,
        _option(
            "launch.tensorboard",
            "Write event files (default: yes).",
            RUN,
            flag="--tensorboard/--no-tensorboard",
        ),
    ] = None
    wandb: Annotated[
        str | None,
        _option(
            "launch.wandb",
            "Project of Weights & Biases that gets the metrics too.",
            RUN,
            "NAME",
        ),
    ] = None


@cache
def _made() -> Mapping[str, Any]:
    """What `option_of` made, by field."""
    hints = get_type_hints(ExperimentOptions, include_extras=True)
    options = {name: hint.__metadata__[0] for name, hint in hints.items()}
    return {name: option for name, option in options.items() if hasattr(option, "key")}


@cache
def keys() -> Mapping[str, str]:
    """The dotted key of an experiment for every option that has one."""
    return {name: option.key for name, option in _made().items()}


@cache
def flags() -> Mapping[str, str]:
    """The option, as it is typed, of every dotted key of an experiment that has one."""
    return {option.key: option.default.partition("/")[0] for option in _made().values()}


@cache
def numbers() -> frozenset[str]:
    """The options whose text is read as a number, as in a file."""
    return frozenset(name for name, option in _made().items() if option.number)


@cache
def lists() -> frozenset[str]:
    """The options whose text is a list of words with commas between them."""
    return frozenset(name for name, option in _made().items() if option.many)
