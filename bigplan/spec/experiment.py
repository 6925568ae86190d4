"""The experiment file: which model, where, how to train it, and what is pinned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from bigplan.errors import InputError, RefusedError
from bigplan.spec.catalog import find_cluster, find_model, names_path
from bigplan.spec.cluster import MOST_NODES, Cluster
from bigplan.spec.files.document import (
    ProblemsError,
    Spec,
    load_data,
    parse_scalar,
    set_path,
    validate,
    validate_nodes,
)
from bigplan.spec.files.problems import KeyPath
from bigplan.spec.files.reading import read_text, user_path
from bigplan.spec.hardware import NewValue, changeable, refuse_unknown, with_hardware
from bigplan.spec.model import ModelSpec
from bigplan.spec.part import SMALLEST
from bigplan.spec.schedule import MOST_STEPS
from bigplan.spec.training import Training, TrainingRequest, resolve
from bigplan.spec.unplanned import NO_MICS, unplanned
from bigplan.units import Bytes, Seconds, format_bytes

TierName = Literal["gpu", "host", "nvme"]
FLAT = ("set", "hardware")  # an experiment's keys that map dotted names to plain values
EngineName = Literal[
    "auto",
    "any",
    "native",
    "deepspeed",
    "fsdp2",
    "accelerate",
    "megatron",
    "torchtitan",
    "nemo",
]


def _holds_tensors(size: int) -> int:
    """The size, unless it is so small that its unit must have been left out."""
    if 0 < size < SMALLEST:
        remedy = f"write the unit, such as {size} GiB" if size < 1024 else "raise it"
        raise InputError(f"{format_bytes(size)} is too little for any tensor; {remedy}")
    return size


Cap = Annotated[Bytes, AfterValidator(_holds_tensors)]


class LaunchSpec(Spec):
    """How a plan is run."""

    steps: int | None = Field(default=None, gt=0, le=MOST_STEPS)
    """optimizer steps to run; default: training.steps"""
    address: str | None = None
    """address of a running Ray cluster; absent: a local Ray is started"""
    run_dir: str = Field(default="runs", min_length=1)
    """folder for logs, timelines and checkpoints"""
    checkpoint_every: int | None = Field(default=None, ge=0, le=MOST_STEPS)
    """steps between checkpoints; default: 10 minutes; 0: only at the end and when interrupted"""
    checkpoint_keep: int = Field(default=2, ge=0, le=MOST_STEPS)
    """checkpoints kept, the newest; 0: none is written"""
    interface: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,15}$")
    """network interface on which ranks of several nodes listen, by name, such as eth0"""
    elastic: bool = False
    """plan again for the nodes that are left where one is lost, and again when it is back"""
    max_restarts: int = Field(default=3, ge=0, le=MOST_STEPS)
    """starts with fresh workers, in a row without a new step, after a worker was lost"""
    max_skipped: int = Field(default=10, ge=0, le=MOST_STEPS)
    """steps in a row with infinite or NaN gradients after which a run ends; 0: never"""
    tensorboard: bool = True
    """write TensorBoard event files"""
    wandb: str | None = Field(default=None, min_length=1)
    """project of Weights & Biases that gets the metrics too; absent: none"""


class Experiment(Spec):
    """One experiment file. Paths in it are relative to it."""

    model: str | ModelSpec
    """a shipped name, a path (model YAML, config.json or its folder), or the model itself"""
    cluster: str | Cluster
    """a shipped name, a path of a cluster YAML, or the cluster itself"""
    nodes: int | None = Field(default=None, gt=0, le=MOST_NODES)
    """number of nodes; default: what the cluster says"""
    training: TrainingRequest = TrainingRequest()
    launch: LaunchSpec = LaunchSpec()
    set: dict[str, str | int | float] = Field(default_factory=dict)
    """decisions to pin, such as {tp: 8}"""
    caps: dict[TierName, Cap] = Field(default_factory=dict)
    """limits: gpu per device, host and nvme per node, such as {gpu: 16 GiB}"""
    hardware: dict[str, NewValue] = Field(
        default_factory=dict,
        json_schema_extra={"propertyNames": {"enum": [*changeable()]}},
    )
    """figures or parts of every node in place of the cluster's, such as {nvme.drives: 4}"""
    engine: EngineName = "auto"
    """what the plan is for: auto is the fastest of those installed, any whatever is fastest;
    fsdp2 and what follows are planned, and run by their own launchers"""
    prefer: Literal["fastest", "cheapest"] = "fastest"
    """cheapest: fewest dollars for the training (node-hours without a price), nodes may idle"""
    within: Seconds | None = Field(default=None, gt=0)
    """longest time for the whole training, such as 30 d; it needs training.tokens"""
    max_wear: float | None = Field(default=None, ge=0)
    """of the writes that drives are rated for, what the whole training may take, such as 0.1; it
    needs training.tokens, or the steps of training or launch"""

    @field_validator("hardware")
    @classmethod
    def _known(cls, hardware: dict[str, NewValue]) -> dict[str, NewValue]:
        refuse_unknown(hardware)
        return hardware

    @model_validator(mode="after")
    def _refuse(self) -> Experiment:
        _refuse_unplanned(self.set, self.engine)
        if self.within is not None and self.training.tokens is None:
            raise InputError(
                "`within` limits the time of the whole training, whose length is not stated; add "
                "training.tokens, such as 300 B"
            )
        lengths = (self.training.tokens, self.training.steps, self.launch.steps)
        if self.max_wear is not None and lengths == (None, None, None):
            raise InputError(
                "`max_wear` limits what the whole training writes, whose length is not stated; add "
                "training.tokens, such as 300 B, or training.steps, such as 10000"
            )
        return self

    def implausible(self) -> Iterator[tuple[KeyPath, str]]:
        """Implausible figures of a cluster written out here; a named one reports its own."""
        if isinstance(self.cluster, Cluster):
            for path, text in self.cluster.implausible():
                yield ("cluster", *path), text

    def with_settings(self, settings: Mapping[str, str | int | float]) -> Experiment:
        """This experiment with more decisions pinned. Raises RefusedError."""
        _refuse_unplanned(settings, self.engine)
        return self.model_copy(update={"set": {**self.set, **settings}})

    def model_spec(self) -> ModelSpec:
        """The model, looked up. Raises InputError."""
        return find_model(self.model) if isinstance(self.model, str) else self.model

    def cluster_spec(self) -> Cluster:
        """The cluster with `nodes` and `caps` applied. Raises InputError.

        The cheapest plan is of up to so many nodes, which is one where no network connects them.
        """
        cluster = self.whole_cluster()
        if self.nodes is not None and not self.apart():
            cluster = cluster.with_nodes(self.nodes)
        return cluster.with_caps(
            gpu=self.caps.get("gpu"), host=self.caps.get("host"), nvme=self.caps.get("nvme")
        )

    def whole_cluster(self) -> Cluster:
        """The cluster before caps, looked up, with `hardware` applied. Raises InputError."""
        named = self.cluster
        cluster = find_cluster(named) if isinstance(named, str) else named
        return with_hardware(cluster, self.hardware)

    def apart(self) -> bool:
        """Whether up to so many nodes are wanted and no network connects them."""
        some = self.prefer == "cheapest" and self.nodes is not None and self.nodes > 1
        groups = self.whole_cluster().node_groups if some else ()
        return len(groups) == 1 and groups[0].inter_node is None

    def idle_caps(self) -> dict[TierName, int]:
        """Caps that limit nothing, with what the cluster has. Raises InputError."""
        if not self.caps:
            return {}
        groups = self.whole_cluster().node_groups
        have: dict[TierName, int] = {
            "gpu": max(group.gpu.memory for group in groups),
            "host": max(group.host.memory for group in groups),
            "nvme": max(group.nvme.node_capacity if group.nvme else 0 for group in groups),
        }
        return {tier: have[tier] for tier, size in self.caps.items() if size > have[tier]}

    def resolved_training(self) -> Training:
        """The training with this model's defaults. Raises InputError."""
        request = self.training
        if request.steps is None and self.launch.steps is not None:
            # A decay of the learning rate ends with the run.
            request = request.model_copy(update={"steps": self.launch.steps})
        return resolve(request, self.model_spec())


SPREADS_EXPERTS = ("auto", "any", "native", "megatron")  # engines that may


def _refuse_unplanned(settings: Mapping[str, str | int | float], engine: str) -> None:
    for key, value in settings.items():
        if key == "ep" and engine in SPREADS_EXPERTS:
            continue  # these know whether the model has experts
        if key == "zero_group" and str(value) != "0" and engine == "deepspeed":
            raise RefusedError(f"set {key}={value}: {NO_MICS}")
        if str(value) != "1" and (refusal := unplanned(key)):
            raise RefusedError(f"set {key}={value}: {refusal}")


def load_experiment(path: Path, overrides: Mapping[str, object] | None = None) -> Experiment:
    """Read an experiment file; `overrides` maps dotted keys to values that win over it.

    Paths in the file become relative to the working directory. Raises InputError.
    """
    data, root = load_data(read_text(path), str(path))
    if isinstance(data, Mapping):
        _refuse_config(data, path)
        for key, value in (overrides or {}).items():
            data = set_key(data, key, value)
        refuse_sweep(data, path)
    try:
        experiment = validate_nodes(data, root, Experiment, str(path))
    except ProblemsError as error:
        raise _of_options(error, overrides or {}) from None
    return rebased(experiment, path.parent, overrides or {})


def _of_options(error: ProblemsError, overrides: Mapping[str, object]) -> ProblemsError:
    """The problems with values from the command line, which are on no line; else all there are."""

    def given(path: KeyPath) -> bool:
        names = accumulate(map(str, path), "{}.{}".format)
        return any(name in overrides for name in names)

    found = [replace(p, line=None) for p in error.problems if given(p.path)]
    return ProblemsError(found, "command line") if found else error


def _refuse_config(data: Mapping[str, Any], path: Path) -> None:
    """Raise InputError for a Hugging Face config, which is a model and no experiment."""
    if {"model_type", "architectures"} & {*data} and "model" not in data:
        raise InputError(
            f"{path} is a Hugging Face config, which describes a model and no experiment; give it "
            f"as `--model {path}`, with --cluster NAME"
        )


def refuse_sweep(data: Mapping[str, Any], path: Path) -> None:
    """Raise InputError for a file that holds many experiments."""
    for key in ("sweep", "find"):
        if key in data:
            raise InputError(
                f"{path} holds many experiments (`{key}`): run `bigplan experiment run {path}`, or "
                f"leave `{key}` out for one plan"
            )


def set_key(data: Mapping[str, Any], key: str, value: object) -> dict[str, Any]:
    """A copy with the key set; names of decisions and of hardware figures may hold dots."""
    first, _, rest = key.partition(".")
    inner = data.get(first) or {}
    if first not in FLAT or not rest or not isinstance(inner, Mapping):
        return set_path(data, key, value)
    told = parse_scalar(value) if isinstance(value, str) else value
    return {**data, first: {**inner, rest: told}}


def make_experiment(overrides: Mapping[str, object]) -> Experiment:
    """An experiment without a file: dotted keys and values, as from the command line."""
    data: dict[str, Any] = {}
    for key, value in overrides.items():
        data = set_key(data, key, value)
    return validate(data, Experiment, "command line")


def rebased(experiment: Experiment, folder: Path, overrides: Mapping[str, object]) -> Experiment:
    """The experiment with paths seen from the file's folder; paths from the command line stay."""
    changes: dict[str, Any] = {}
    for key in ("model", "cluster"):
        value = getattr(experiment, key)
        if isinstance(value, str) and key not in overrides:
            changes[key] = _from(folder, value, names_path(value, folder))
    training: dict[str, Any] = {
        key: _from(folder, value, True)
        for key in ("data", "weights")
        if (value := getattr(experiment.training, key)) not in (None, "bundled")
        and f"training.{key}" not in overrides
    }
    validation, lora = experiment.training.validation, experiment.training.lora
    if validation is not None and "training.validation.data" not in overrides:
        data = _from(folder, validation.data, validation.data != "bundled")
        training["validation"] = validation.model_copy(update={"data": data})
    if lora is not None and lora.weights and "training.lora.weights" not in overrides:
        weights = _from(folder, lora.weights, True)
        training["lora"] = lora.model_copy(update={"weights": weights})
    if training:
        changes["training"] = experiment.training.model_copy(update=training)
    return experiment.model_copy(update=changes)


def _from(folder: Path, text: str, is_path: bool) -> str:
    return str(folder / user_path(text)) if is_path else text
