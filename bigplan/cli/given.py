"""An experiment, and how it is run, from the options of a command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bigplan.cli.options import ExperimentOptions, flags, keys, lists, numbers
from bigplan.errors import InputError, quoted, shortened
from bigplan.spec.experiment import Experiment, TierName, load_experiment, make_experiment
from bigplan.spec.files.document import load_data, parse_scalar
from bigplan.spec.files.problems import problem_at
from bigplan.spec.files.reading import read_text
from bigplan.spec.training import TrainingRequest, resolve
from bigplan.units import format_bytes

if TYPE_CHECKING:
    from bigplan.planner import Request

_STEP_SIZES = ("training.tokens_per_step", "training.global_batch")
# Options that are read separately below.
_APART = ("settings", "caps", "hardware", "clip_norm")
RUN_KEYS = tuple(name for name, key in keys().items() if key.startswith("launch."))


def overrides_of(options: ExperimentOptions) -> dict[str, object]:
    """Dotted experiment keys and the values the user gave. Raises InputError."""
    overrides: dict[str, object] = {}
    for name, key in keys().items():
        value = None if name in _APART else getattr(options, name)
        if value is not None and name in lists():
            overrides[key] = [word.strip() for word in value.split(",")]
        elif value is not None:
            # Text is read as YAML later; quoting keeps "off" or "a: b" as they are.
            quoted_text = isinstance(value, str) and name not in numbers()
            overrides[key] = json.dumps(value) if quoted_text else value
    if options.clip_norm is not None:
        unclipped = options.clip_norm.lower() in ("none", "null")
        overrides["training.clip_norm"] = None if unclipped else options.clip_norm
    for one, other in (_STEP_SIZES, _STEP_SIZES[::-1]):  # an option wins over either in a file
        if one in overrides:
            overrides.setdefault(other, None)
    for key, text in _pairs("--hardware", options.hardware, "nvme.drives=4").items():
        overrides[f"hardware.{key}"] = text
    for tier, size in _pairs("--cap", options.caps, "gpu=16GiB").items():
        overrides[f"caps.{tier}"] = size
    return overrides


def experiment_of(
    path: Path | None, options: ExperimentOptions, base: Mapping[str, object] | None = None
) -> Experiment:
    """The experiment file, options winning over it, or the options alone, over `base` if given.

    Warns of caps that limit nothing, and of nodes without a network. Raises InputError.
    """
    overrides = overrides_of(options)
    if path is None:
        overrides = {**(base or {}), **overrides}
        missing = [name for name in ("model", "cluster") if name not in overrides]
        if missing:
            flags = " and ".join(f"--{name}" for name in missing)
            remedy = "name an experiment file, or state --model and --cluster"
            raise InputError(f"{flags} missing; {remedy if base is None else 'the file has none'}")
        experiment = make_experiment(overrides)
    else:
        experiment = load_experiment(path, overrides)
    settings = _pairs("--set", options.settings, "tp=8")
    fixed = {key: _plain(text) for key, text in settings.items()}
    for key, ways in (("cp", options.context_parallel), ("ep", options.expert_parallel)):
        if ways is not None:
            fixed[key] = ways
    if path is not None:
        _refuse_settings(path, experiment, overridden=fixed)
    if base is None or options.cluster is not None:  # a base's own cluster may already have caps
        _warn_of_idle_caps(experiment)
    if experiment.apart():
        typer.echo(
            f"warning: no network connects the cluster's nodes, so of {experiment.nodes} one alone "
            "is planned; `inter_node` of a cluster file describes a network",
            err=True,
        )
    return experiment.with_settings(fixed)


def _refuse_settings(path: Path, experiment: Experiment, overridden: Collection[str]) -> None:
    """Raise InputError, with the line, for a decision in the file that is impossible."""
    settings = {key: value for key, value in experiment.set.items() if key not in overridden}
    if not settings:
        return
    from bigplan.solve.pins import parse_pins, refuse_unknown_kind  # this imports the solver

    kinds = experiment.model_spec().kinds()
    for key, value in settings.items():
        try:
            for pin in parse_pins({key: value})[1]:
                refuse_unknown_kind(pin, kinds)
        except InputError as error:
            _, root = load_data(read_text(path), str(path))
            text = f"cannot be used: {str(error).removeprefix('--set ')}"
            raise InputError(f"{path}{problem_at(('set', key), text, root)}") from None


_WHERE: Mapping[TierName, str] = {
    "gpu": "per GPU",
    "host": "of host memory per node",
    "nvme": "of drives per node",
}


def _warn_of_idle_caps(experiment: Experiment) -> None:
    for tier, size in experiment.idle_caps().items():
        cap = format_bytes(experiment.caps[tier])
        typer.echo(
            f"warning: the cap {tier}={cap} limits nothing: the cluster has {format_bytes(size)} "
            f"{_WHERE[tier]}",
            err=True,
        )


def run_options_given(options: ExperimentOptions) -> dict[str, object]:
    """The given options that say how a plan is run."""
    values = {name: getattr(options, name) for name in RUN_KEYS}
    given = {name: value for name, value in values.items() if value is not None}
    return {name: _plain(v) if name in numbers() else v for name, v in given.items()}


def plan_options_given(options: ExperimentOptions) -> list[str]:
    """Names of the given options that would change a plan."""
    return [
        field.name
        for field in fields(options)
        if field.name not in RUN_KEYS and getattr(options, field.name) not in (None, [])
    ]


def options_for(request: Request, options: ExperimentOptions) -> str:
    """Options of `plan` for the request's training, on the model and machine that were named."""
    training = request.training
    sizes = {name: getattr(training, name) for name in ("sequence_length", "global_batch")}
    usual = dict(_dotted(resolve(TrainingRequest(**sizes), request.model).model_dump(mode="json")))
    words = ["--model", str(options.model), "--cluster", str(options.cluster)]
    if request.cluster.nodes > 1:
        words += ["--nodes", str(request.cluster.nodes)]
    for flag, texts in (("--cap", options.caps), ("--hardware", options.hardware)):
        words += [word for text in texts or () for word in (flag, text)]
    for key, value in _dotted(training.model_dump(mode="json")):
        named = flags().get(f"training.{key}")
        if named is not None and (key in sizes or value != usual.get(key)):
            words += [named] if value is True else [named, "none" if value is None else str(value)]
    return shlex.join(words)


def _dotted(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _pairs(flag: str, texts: list[str] | None, example: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key.strip() or not equals or not value.strip():
            raise InputError(f"{flag} {quoted(text)}: write KEY=VALUE, such as {flag} {example}")
        key, value = key.strip(), value.strip()
        if key in pairs:
            raise InputError(
                f"{flag} says {shortened(key)}={shortened(pairs[key])} and "
                f"{shortened(key)}={shortened(value)}, of which only one can hold; "
                "leave one out"
            )
        pairs[key] = value
    return pairs


def environment_of(texts: list[str] | None) -> dict[str, str]:
    """Variables of `--env`. Raises InputError."""
    return _pairs("--env", texts, "DS_PIN_MEMORY_BACKEND=native")


def _plain(text: str) -> str | int | float:
    value = parse_scalar(text)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number else text
