"""The keys of an experiment as arguments: the same names, and the same values, as in its YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from bigplan.spec.cluster import Cluster
from bigplan.spec.experiment import EngineName, Launch, TierName
from bigplan.spec.files.document import Spec
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training, TrainingRequest


class LaunchKeys(TypedDict, total=False):
    """How a plan is run: the keys under `launch:`."""

    steps: int | None
    address: str | None
    run_dir: str
    checkpoint_every: int | None
    checkpoint_keep: int
    interface: str | None
    elastic: bool
    max_restarts: int
    max_skipped: int
    tensorboard: bool
    wandb: str | None


class ExperimentKeys(TypedDict, total=False):
    """What to plan. Quantities are numbers in SI units or text with a unit, such as "24 GiB"."""

    model: str | Path | ModelSpec
    cluster: str | Path | Cluster
    nodes: int | None
    training: Mapping[str, Any] | TrainingRequest | Training
    launch: LaunchKeys | Launch
    set: Mapping[str, str | int | float]
    caps: Mapping[TierName, int | str]
    hardware: Mapping[str, Any]
    engine: EngineName
    prefer: Literal["fastest", "cheapest"]
    within: float | str | None
    max_wear: float | None


def plain(value: object) -> Any:
    """A value of the keys as YAML would give it; keys that a description left out stay out."""
    if isinstance(value, Spec):
        return value.model_dump(mode="json", exclude_unset=not isinstance(value, Training))
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def merged(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings merged; `given` wins key by key, in inner mappings too."""
    made = dict(before)
    for key, value in given.items():
        inner = made.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        made[key] = merged(inner, value) if both and isinstance(inner, Mapping) else value
    return made
