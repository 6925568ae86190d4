"""Every key of an experiment as an option, declared once and shared by the commands."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from bigplan.capabilities import NATIVE_TRAINING
from bigplan.errors import InputError, quoted
from bigplan.spec.document import load_data, parse_scalar
from bigplan.spec.experiment import Experiment, Tier, load_experiment, make_experiment
from bigplan.spec.problems import problem_at
from bigplan.spec.reading import read_text
from bigplan.units import format_bytes

WHAT, STEP, ADAM, RUN = "What and where", "Training", "Optimizer", "Run"


def _option(flag: str, text: str, panel: str, metavar: str | None = None) -> Any:
    """An option whose help says where the runtime takes nothing but the default."""
    key = flag.partition("/")[0].removeprefix("--").replace("-", "_")
    planned = " Planned only: `launch` refuses all but the default." * (key in NATIVE_TRAINING)
    return typer.Option(flag, help=text + planned, rich_help_panel=panel, metavar=metavar)


@dataclass(frozen=True)
class ExperimentOptions:
    """Options that override an experiment's keys; None leaves a key alone."""

    model: Annotated[
        str | None,
        _option("--model", "Shipped name, model YAML, or Hugging Face config.json.", WHAT, "NAME"),
    ] = None
    cluster: Annotated[
        str | None, _option("--cluster", "Shipped name or cluster YAML.", WHAT, "NAME")
    ] = None
    nodes: Annotated[
        int | None, _option("--nodes", "Number of nodes (default: the cluster's).", WHAT)
    ] = None
    engine: Annotated[
        str | None,
        _option(
            "--engine",
            "What executes it (default auto: the fastest that can here); any: the planner's best. "
            "Planned only, for `bigplan config`: fsdp2, accelerate, megatron, torchtitan, nemo.",
            WHAT,
            "auto|any|native|deepspeed|TOOL",
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        _option("--set", "Fix a decision, such as tp=8; repeatable.", WHAT, "KEY=VALUE"),
    ] = None
    caps: Annotated[
        list[str] | None,
        _option(
            "--cap",
            "Limit gpu (per GPU), host or nvme (per node), such as gpu=16GiB; repeatable.",
            WHAT,
            "TIER=SIZE",
        ),
    ] = None
    hardware: Annotated[
        list[str] | None,
        _option(
            "--hardware",
            "Plan for a node with another part, such as nvme.drives=4 or gpu=h200-sxm; repeatable.",
            WHAT,
            "KEY=VALUE",
        ),
    ] = None
    prefer: Annotated[
        str | None,
        _option(
            "--prefer",
            "fastest (default), or cheapest: fewest dollars for the training; nodes may idle.",
            WHAT,
            "fastest|cheapest",
        ),
    ] = None
    within: Annotated[
        str | None,
        _option(
            "--within",
            "Longest time for the whole training, such as '30 d'; needs --tokens.",
            WHAT,
            "TIME",
        ),
    ] = None
    tokens: Annotated[
        str | None,
        _option(
            "--tokens",
            "Of the whole training, such as 1T: the plan tells its days, dollars and kWh.",
            STEP,
            "N",
        ),
    ] = None
    tokens_per_step: Annotated[
        str | None,
        _option("--tokens-per-step", "In place of --global-batch, such as 65536.", STEP, "N"),
    ] = None
    sequence_length: Annotated[
        int | None,
        _option("--seq-len", "Tokens in a sequence (default: the model's, at most 8192).", STEP),
    ] = None
    global_batch: Annotated[
        int | None,
        _option(
            "--global-batch",
            "Sequences per step, over all GPUs (default: 4 Mi tokens' worth).",
            STEP,
        ),
    ] = None
    precision: Annotated[
        str | None, _option("--precision", "Of compute (default: bf16).", STEP, "bf16|fp16|fp32")
    ] = None
    gradient_precision: Annotated[
        str | None,
        _option(
            "--gradient-precision",
            "Of stored gradients: fp32, or the precision (default: fp32).",
            STEP,
            "bf16|fp16|fp32",
        ),
    ] = None
    reduce_precision: Annotated[
        str | None,
        _option(
            "--reduce-precision",
            "In which data-parallel ranks sum gradients (default: as they are stored, and `launch` "
            "refuses another).",
            STEP,
            "bf16|fp16|fp32",
        ),
    ] = None
    fp8_gemms: Annotated[
        bool | None,
        _option("--fp8-gemms/--no-fp8-gemms", "The blocks' GEMMs in fp8 (default: no).", STEP),
    ] = None
    attention: Annotated[
        str | None,
        _option(
            "--attention",
            "flash (default), or materialised: scores go through memory.",
            STEP,
            "flash|materialised",
        ),
    ] = None
    kernels: Annotated[
        str | None,
        _option(
            "--kernels",
            "Of norms, activations and the loss: torch's with four written by hand (default), or "
            "generated ones.",
            STEP,
            "torch|generated",
        ),
    ] = None
    dropout: Annotated[
        float | None, _option("--dropout", "Probability of dropout (default: 0).", STEP)
    ] = None
    clip_norm: Annotated[
        str | None,
        _option("--clip-norm", "Largest gradient norm, or none (default: 1.0).", STEP, "X|none"),
    ] = None
    seed: Annotated[int | None, _option("--seed", "Seed (default: 0).", STEP)] = None
    deterministic: Annotated[
        bool | None,
        _option("--deterministic", "The same bits every time on a GPU too, slower.", STEP),
    ] = None
    data: Annotated[
        str | None,
        _option("--data", "Prepared folder or text file (default: a bundled text).", STEP, "PATH"),
    ] = None
    weights: Annotated[
        str | None,
        _option("--weights", "Hugging Face folder to start from (default: random).", STEP, "DIR"),
    ] = None
    optimizer: Annotated[
        str | None, _option("--optimizer", "adamw (default) or sgd.", ADAM, "adamw|sgd")
    ] = None
    learning_rate: Annotated[float | None, _option("--learning-rate", "default: 3e-4.", ADAM)] = (
        None
    )
    beta1: Annotated[float | None, _option("--beta1", "default: 0.9.", ADAM)] = None
    beta2: Annotated[float | None, _option("--beta2", "default: 0.95.", ADAM)] = None
    epsilon: Annotated[float | None, _option("--epsilon", "default: 1e-8.", ADAM)] = None
    momentum: Annotated[float | None, _option("--momentum", "Of sgd; default: 0.9.", ADAM)] = None
    weight_decay: Annotated[
        float | None, _option("--weight-decay", "default: 0.1; of sgd 0.", ADAM)
    ] = None
    schedule: Annotated[
        str | None,
        _option(
            "--schedule",
            "Learning rate after the warm-up (default: constant).",
            ADAM,
            "constant|linear|cosine",
        ),
    ] = None
    warmup_steps: Annotated[
        int | None,
        _option("--warmup-steps", "Steps in which the learning rate rises (default: 0).", ADAM),
    ] = None
    decay_steps: Annotated[
        int | None,
        _option("--decay-steps", "Steps until the decay ends (default: all steps).", ADAM),
    ] = None
    final_fraction: Annotated[
        float | None,
        _option("--final-fraction", "Part of the learning rate left then (default: 0).", ADAM),
    ] = None
    loss_scale: Annotated[
        float | None,
        _option("--loss-scale", "fp16's first loss scale (default: 65536).", ADAM),
    ] = None
    # What other programs call these; not planned, and refused by name.
    context_parallel: Annotated[int | None, typer.Option("--context-parallel", hidden=True)] = None
    expert_parallel: Annotated[int | None, typer.Option("--expert-parallel", hidden=True)] = None
    steps: Annotated[
        int | None, _option("--steps", "Optimizer steps to run (default: 20).", RUN)
    ] = None
    address: Annotated[
        str | None,
        _option("--address", "A running Ray cluster (default: start a local Ray).", RUN),
    ] = None
    interface: Annotated[
        str | None,
        _option(
            "--interface",
            "Network interface on which ranks of several nodes listen, such as eth0.",
            RUN,
            "NAME",
        ),
    ] = None
    elastic: Annotated[
        bool | None,
        _option(
            "--elastic/--no-elastic",
            "Where a node is lost, plan for those that are left, and again when it is back.",
            RUN,
        ),
    ] = None
    run_dir: Annotated[
        str | None, _option("--run-dir", "Folder for run records (default: runs).", RUN, "DIR")
    ] = None
    checkpoint_every: Annotated[
        int | None,
        _option(
            "--checkpoint-every",
            "Steps between checkpoints (default: 10 minutes); 0: only at the end and on Ctrl-C.",
            RUN,
            "STEPS",
        ),
    ] = None
    checkpoint_keep: Annotated[
        int | None,
        _option("--checkpoint-keep", "Checkpoints kept (default: 2); 0: none is written.", RUN),
    ] = None
    max_restarts: Annotated[
        int | None,
        _option(
            "--max-restarts",
            "Starts with fresh workers where one is lost, in a row without a new step (default: "
            "3); 0: none.",
            RUN,
        ),
    ] = None
    max_skipped: Annotated[
        int | None,
        _option(
            "--max-skipped",
            "Steps in a row with infinite or NaN gradients after which a run ends (default: 10; "
            "those in which fp16's loss scale falls do not count); 0: never.",
            RUN,
        ),
    ] = None
    tensorboard: Annotated[
        bool | None,
        _option("--tensorboard/--no-tensorboard", "Write event files (default: yes).", RUN),
    ] = None
    wandb: Annotated[
        str | None,
        _option("--wandb", "Project of Weights & Biases that gets the metrics too.", RUN, "NAME"),
    ] = None


_KEYS = {
    "model": "model",
    "cluster": "cluster",
    "nodes": "nodes",
    "engine": "engine",
    "prefer": "prefer",
    "within": "within",
    "sequence_length": "training.sequence_length",
    "global_batch": "training.global_batch",
    "precision": "training.precision",
    "gradient_precision": "training.gradient_precision",
    "reduce_precision": "training.reduce_precision",
    "fp8_gemms": "training.fp8_gemms",
    "attention": "training.attention",
    "kernels": "training.kernels",
    "dropout": "training.dropout",
    "seed": "training.seed",
    "deterministic": "training.deterministic",
    "data": "training.data",
    "weights": "training.weights",
    "optimizer": "training.optimizer.name",
    "learning_rate": "training.optimizer.learning_rate",
    "beta1": "training.optimizer.beta1",
    "beta2": "training.optimizer.beta2",
    "epsilon": "training.optimizer.epsilon",
    "momentum": "training.optimizer.momentum",
    "weight_decay": "training.optimizer.weight_decay",
    "schedule": "training.schedule.name",
    "warmup_steps": "training.schedule.warmup_steps",
    "decay_steps": "training.schedule.decay_steps",
    "final_fraction": "training.schedule.final_fraction",
    "loss_scale": "training.loss_scale.initial",
    "steps": "launch.steps",
    "address": "launch.address",
    "interface": "launch.interface",
    "elastic": "launch.elastic",
    "run_dir": "launch.run_dir",
    "checkpoint_every": "launch.checkpoint_every",
    "checkpoint_keep": "launch.checkpoint_keep",
    "max_restarts": "launch.max_restarts",
    "max_skipped": "launch.max_skipped",
    "tensorboard": "launch.tensorboard",
    "wandb": "launch.wandb",
}
RUN_KEYS = tuple(name for name, key in _KEYS.items() if key.startswith("launch."))


def overrides_of(options: ExperimentOptions) -> dict[str, object]:
    """Dotted experiment keys and the values the user gave. Raises InputError."""
    overrides: dict[str, object] = {}
    for name, key in _KEYS.items():
        value = getattr(options, name)
        if value is not None:
            # Text is read as YAML further on; quoting keeps "off" or "a: b" what it is.
            overrides[key] = json.dumps(value) if isinstance(value, str) else value
    if options.clip_norm is not None:
        unclipped = options.clip_norm.lower() in ("none", "null")
        overrides["training.clip_norm"] = None if unclipped else options.clip_norm
    for name in ("tokens", "tokens_per_step"):
        if (text := getattr(options, name)) is not None:
            overrides[f"training.{name}"] = text  # a number, or text with a unit
    for key, text in _pairs("--hardware", options.hardware, "nvme.drives=4").items():
        overrides[f"hardware.{key}"] = text
    for tier, size in _pairs("--cap", options.caps, "gpu=16GiB").items():
        overrides[f"caps.{tier}"] = size
    return overrides


def experiment_of(
    path: Path | None, options: ExperimentOptions, base: Mapping[str, object] | None = None
) -> Experiment:
    """The experiment file, options winning over it, or the options alone, over `base` if given.

    Warns of caps that limit nothing. Raises InputError.
    """
    overrides = overrides_of(options)
    if path is None:
        overrides = {**(base or {}), **overrides}
        missing = [name for name in ("model", "cluster") if name not in overrides]
        if missing:
            flags = " and ".join(f"--{name}" for name in missing)
            raise InputError(
                f"{flags} missing; name an experiment file, or state --model and --cluster"
            )
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
    if base is None or options.cluster is not None:  # a base's own cluster may be capped already
        _warn_of_idle_caps(experiment)
    return experiment.with_settings(fixed)


def _refuse_settings(path: Path, experiment: Experiment, overridden: Collection[str]) -> None:
    """Raise InputError, with the line, for a decision of the file that cannot be."""
    settings = {key: value for key, value in experiment.set.items() if key not in overridden}
    if not settings:
        return
    from bigplan.solve.pins import parse_pins, refuse_unknown_kind  # which bring the solver

    kinds = experiment.model_spec().kinds()
    for key, value in settings.items():
        try:
            for pin in parse_pins({key: value})[1]:
                refuse_unknown_kind(pin, kinds)
        except InputError as error:
            _, root = load_data(read_text(path), str(path))
            text = f"cannot be used: {str(error).removeprefix('--set ')}"
            raise InputError(f"{path}{problem_at(('set', key), text, root)}") from None


_WHERE: Mapping[Tier, str] = {
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
    return {name: value for name, value in values.items() if value is not None}


def plan_options_given(options: ExperimentOptions) -> list[str]:
    """Names of the given options that would change a plan."""
    return [
        field.name
        for field in fields(options)
        if field.name not in RUN_KEYS and getattr(options, field.name) not in (None, [])
    ]


def _pairs(flag: str, texts: list[str] | None, example: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key.strip() or not equals or not value.strip():
            raise InputError(f"{flag} {quoted(text)}: write KEY=VALUE, such as {flag} {example}")
        key, value = key.strip(), value.strip()
        if key in pairs:
            raise InputError(
                f"{flag} says {key}={pairs[key]} and {key}={value}, of which only one can hold; "
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
