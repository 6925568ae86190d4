"""The experiment file: which model, where, how to train it, and what is pinned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from bigplan.errors import InputError, RefusedError
from bigplan.spec.catalog import find_cluster, find_model, looks_like_path
from bigplan.spec.cluster import Cluster
from bigplan.spec.document import Spec, load_data, read_text, set_path, validate, validate_nodes
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training, TrainingRequest, resolve
from bigplan.spec.unplanned import unplanned
from bigplan.units import (
    BANDWIDTH,
    BYTES,
    FLOPS,
    RATE,
    SECONDS,
    Bytes,
    Quantity,
    exact_text,
    format_bytes,
)

Tier = Literal["gpu", "host", "nvme"]

# A number without a unit is in SI units. Less of these than a million, or such times from a second
# on, is no machine but a unit left out, as in `memory: 80`.
_SMALLEST = 2**20
_LARGE: Mapping[str, Quantity] = {
    **dict.fromkeys(("memory", "capacity", "endurance"), BYTES),
    **dict.fromkeys(("memory_bandwidth", "bandwidth", "read", "write"), BANDWIDTH),
    **dict.fromkeys(("host_to_device", "device_to_host"), BANDWIDTH),
    **dict.fromkeys(("node_host_to_device", "node_device_to_host"), BANDWIDTH),
    "peak_flops": FLOPS,
    "adam_rate": RATE,
}
_SHORT = ("latency", "launch_overhead")


class Launch(Spec):
    """How a plan is run."""

    steps: int | None = Field(default=None, gt=0)
    """optimizer steps to run; default: training.steps"""
    address: str | None = None
    """address of a running Ray cluster; absent: a local Ray is started"""
    run_dir: str = Field(default="runs", min_length=1)
    """folder for logs, timelines and checkpoints"""
    checkpoint_every: int | None = Field(default=None, ge=0)
    """steps between checkpoints; default: 10 minutes; 0: only at the end and when interrupted"""
    checkpoint_keep: int = Field(default=2, ge=0)
    """checkpoints kept, the newest; 0: none is written"""
    tensorboard: bool = True
    """write TensorBoard event files"""


class Experiment(Spec):
    """One experiment file. Paths in it are relative to it."""

    model: str | ModelSpec
    """a shipped name, a path (model YAML, config.json or its folder), or the model itself"""
    cluster: str | Cluster
    """a shipped name, a path of a cluster YAML, or the cluster itself"""
    nodes: int | None = Field(default=None, gt=0)
    """number of nodes; default: what the cluster says"""
    training: TrainingRequest = TrainingRequest()
    launch: Launch = Launch()
    set: dict[str, str | int | float] = Field(default_factory=dict)
    """decisions to pin, such as {tp: 8}"""
    caps: dict[Tier, Bytes] = Field(default_factory=dict)
    """limits: gpu per device, host and nvme per node, such as {gpu: 16 GiB}"""
    engine: Literal["any", "native"] = "any"
    """which runtime the plan must suit"""

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        for tier, size in self.caps.items():
            if 0 < size < _SMALLEST:
                raise InputError(
                    f"caps.{tier} is {format_bytes(size)}, too little for any tensor; "
                    f"write the unit, such as {tier}: {size} GiB"
                )
        return self

    @model_validator(mode="after")
    def _refuse(self) -> Experiment:
        _refuse_unplanned(self.set)
        return self

    def with_settings(self, settings: Mapping[str, str | int | float]) -> Experiment:
        """This experiment with more decisions pinned. Raises RefusedError."""
        _refuse_unplanned(settings)
        return self.model_copy(update={"set": {**self.set, **settings}})

    def model_spec(self) -> ModelSpec:
        """The model, looked up. Raises InputError."""
        return find_model(self.model) if isinstance(self.model, str) else self.model

    def cluster_spec(self) -> Cluster:
        """The cluster with `nodes` and `caps` applied. Raises InputError."""
        cluster = self.cluster
        if isinstance(cluster, str):
            cluster = find_cluster(cluster)
        _refuse_left_out_units(cluster)
        if self.nodes is not None:
            cluster = cluster.with_nodes(self.nodes)
        return cluster.with_caps(
            gpu=self.caps.get("gpu"), host=self.caps.get("host"), nvme=self.caps.get("nvme")
        )

    def resolved_training(self) -> Training:
        """The training with this model's defaults. Raises InputError."""
        request = self.training
        if request.steps is None and self.launch.steps is not None:
            # A decay of the learning rate ends with the run.
            request = request.model_copy(update={"steps": self.launch.steps})
        return resolve(request, self.model_spec())


def _refuse_left_out_units(cluster: Cluster) -> None:
    for key, value in _figures(cluster):
        name = key.split(".")[1]
        quantity = _LARGE.get(name, SECONDS)
        wrong = value < _SMALLEST if name in _LARGE else name in _SHORT and value >= 1
        if wrong:
            raise InputError(
                f"cluster {cluster.name!r}: {key} is {exact_text(quantity, value)}, which no "
                f"machine has; a number without a unit is in SI units: write the unit, such as "
                f"'{quantity.example}'"
            )


def _figures(cluster: Cluster) -> Iterator[tuple[str, float]]:
    """Every number of every block, by `BLOCK.FIELD` or `BLOCK.FIELD.PRECISION`."""
    for group in cluster.node_groups:
        for block in ("gpu", "host", "pcie", "nvme", "intra_node", "inter_node"):
            for name, value in getattr(group, block) or ():
                values = value if isinstance(value, Mapping) else {"": value}
                for part, number in values.items():
                    if isinstance(number, int | float):
                        yield f"{block}.{name}.{part}".rstrip("."), number


def _refuse_unplanned(settings: Mapping[str, str | int | float]) -> None:
    for key, value in settings.items():
        if str(value) != "1" and (refusal := unplanned(key)):
            raise RefusedError(f"set {key}={value}: {refusal}")


def load_experiment(path: Path, overrides: Mapping[str, object] | None = None) -> Experiment:
    """Read an experiment file; `overrides` maps dotted keys to values that win over it.

    Paths in the file become relative to the working directory. Raises InputError.
    """
    data, root = load_data(read_text(path), str(path))
    if isinstance(data, Mapping):
        for key, value in (overrides or {}).items():
            data = set_path(data, key, value)
    experiment = validate_nodes(data, root, Experiment, str(path))
    return _rebased(experiment, path.parent, overrides or {})


def make_experiment(overrides: Mapping[str, object]) -> Experiment:
    """An experiment without a file: dotted keys and values, as from the command line."""
    data: dict[str, Any] = {}
    for key, value in overrides.items():
        data = set_path(data, key, value)
    return validate(data, Experiment, "command line")


def _rebased(experiment: Experiment, folder: Path, overrides: Mapping[str, object]) -> Experiment:
    """Paths seen from the file's folder; those given on the command line stay as they are."""
    changes: dict[str, Any] = {}
    for key in ("model", "cluster"):
        value = getattr(experiment, key)
        if isinstance(value, str) and key not in overrides:
            changes[key] = _from(folder, value, looks_like_path(value))
    training: dict[str, Any] = {
        key: _from(folder, value, True)
        for key in ("data", "weights")
        if (value := getattr(experiment.training, key)) not in (None, "bundled")
        and f"training.{key}" not in overrides
    }
    validation = experiment.training.validation
    if validation is not None and "training.validation.data" not in overrides:
        data = _from(folder, validation.data, validation.data != "bundled")
        training["validation"] = validation.model_copy(update={"data": data})
    if training:
        changes["training"] = experiment.training.model_copy(update=training)
    return experiment.model_copy(update=changes)


def _from(folder: Path, text: str, is_path: bool) -> str:
    return str(folder / Path(text).expanduser()) if is_path else text
