"""The plan: every decision, what it was made for, and what it promises. Frozen, diffable YAML.

Equal inputs give equal bytes: no wall time, host name or path enters a plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from bigplan.errors import InputError
from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement, Tier
from bigplan.spec.cluster import Cluster
from bigplan.spec.document import Spec, load_document
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training


class MemoryUse(Spec):
    """Bytes of one tier: per GPU of a stage, or per node of a stage's ranks."""

    stage: int
    tier: Tier
    scope: Literal["gpu", "node"]
    used_bytes: int
    capacity_bytes: int
    by_purpose: Mapping[str, int]


class Alternative(Spec):
    """Another strategy's best plan, and what it lost by."""

    strategy: Strategy
    step_seconds: float
    bottleneck: str


class Predicted(Spec):
    """What the plan promises.

    The band spans scheduling only: `low` is this plan with perfect overlap, `high` nothing
    overlapping at all. It does not cover errors of the rates themselves.
    """

    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    tokens_per_second: float
    mfu: float
    lower_bound_seconds: float
    model_gap: float
    simulated_gap: float
    bottleneck: str
    busy_seconds: Mapping[str, float]
    op_seconds: Mapping[str, float]
    memory: tuple[MemoryUse, ...]


class SearchRecord(Spec):
    """How the plan was found; counts only, so that equal inputs stay equal."""

    solver: str
    strategies: int
    relaxations: int
    programs: int


class Plan(Spec):
    """Everything that launching, simulating and explaining need."""

    format: Literal[1] = 1
    inputs: Mapping[str, str] = Field(description="SHA-256 of each input, canonically written")
    predicted: Predicted
    strategy: Strategy
    placement: Placement
    executable: Mapping[str, bool | str]
    search: SearchRecord
    alternatives: tuple[Alternative, ...]
    model: ModelSpec
    training: Training
    cluster: Cluster


def digest(spec: Spec) -> str:
    """SHA-256 of a description, independent of how it was written."""
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def plan_text(plan: Plan) -> str:
    """The plan as YAML."""
    data = plan.model_dump(mode="json")
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


def save_plan(plan: Plan, path: Path) -> None:
    """Write the plan. Raises InputError where the file cannot be written."""
    try:
        path.write_text(plan_text(plan))
    except OSError as error:
        raise InputError(f"cannot write the plan to {path}: {error.strerror}") from error


def load_plan(path: Path) -> Plan:
    """Read a plan. Raises InputError naming file, line and rule."""
    plan = load_document(path, Plan)
    for name in ("model", "training", "cluster"):
        if plan.inputs.get(name) != digest(getattr(plan, name)):
            raise InputError(
                f"{path}: `{name}` was changed after the plan was made (its digest differs), so "
                "the plan's decisions do not belong to it; run `bigplan plan` again"
            )
    return plan
