"""The plan: all decisions, the inputs they were made for, and the predictions. Written as YAML.

Equal inputs give equal bytes: no wall time, host name or path enters a plan.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from bigplan.errors import InputError
from bigplan.graph.build import graph_of_shape, model_flops
from bigplan.graph.graph import Graph
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement, Tier
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.files.document import Spec, dump_document, parse_document, write_text
from bigplan.spec.files.reading import read_text
from bigplan.spec.model import ModelSpec
from bigplan.spec.sharing import Scope
from bigplan.spec.training import Training

FORMAT: Final = 7  # of plan files; it grows with every change that makes older files unreadable


class MemoryUse(Spec):
    """Bytes of one tier: per GPU of a stage, or per node of a stage's ranks."""

    stage: int
    tier: Tier
    scope: Scope
    used_bytes: int
    capacity_bytes: int
    by_purpose: Mapping[str, int]


class StepParts(Spec):
    """Where the seconds of a step go on the busiest GPU; the parts add up to the step."""

    compute: float
    recompute: float
    collectives: float
    """collectives within layers (tensor and context parallelism) that the GPU waits for"""
    update: float
    """optimizer, gradient norm and sums on the GPU"""
    bubble: float
    """waiting for other pipeline stages"""
    waiting: float
    """waiting for everything else"""
    waits_for: str
    """the busiest lane beside the GPU's; empty: there is none"""


class Alternative(Spec):
    """The best plan of another strategy, with its step time and memory."""

    strategy: Strategy
    step_seconds: float
    parts: StepParts
    memory: Mapping[Tier, int] = Field(default_factory=dict)
    """bytes of the fullest GPU, and of the fullest node; empty: the plan is older than this key"""


class Predicted(Spec):
    """What the plan promises.

    For four of five predictions of this kind, the measured step lies between `step_seconds_low` and
    `step_seconds_high` (cost/band.py). `step_seconds_overlapped` is the plan's step with perfect
    overlap, `step_seconds_serial` without any. `critical_path` is the chain of actions that leads
    to the end of the step: its seconds by resource add up to the step. The `bottleneck` is the
    resource with most of these seconds. Busy seconds and moved bytes are per GPU. For each lane
    they are those of the stage in which the lane has most to do.
    """

    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    step_seconds_overlapped: float
    step_seconds_serial: float
    tokens_per_second: float
    mfu: float
    lower_bound_seconds: float = Field(gt=0)
    model_gap: float
    simulated_gap: float
    bottleneck: str
    critical_path: Mapping[str, float]
    busy_seconds: Mapping[str, float]
    op_seconds: Mapping[str, float]
    moved_bytes: Mapping[str, int]
    parts: StepParts
    memory: tuple[MemoryUse, ...]


def fullest(memory: Iterable[MemoryUse]) -> dict[Tier, int]:
    """For each tier in use, the bytes that its fullest GPU or node uses."""
    most: dict[Tier, int] = {}
    for use in memory:
        if use.used_bytes:
            most[use.tier] = max(most.get(use.tier, 0), use.used_bytes)
    return most


class Mix(Spec):
    """Groups of a mixed cluster that were planned together, and how long their step takes."""

    groups: tuple[str, ...]
    step_seconds: float | None = None
    """null: no plan was found, for `refusal`"""
    refusal: str = ""
    unequal: bool = Field(default=False, exclude_if=lambda unequal: not unequal)
    """whether each group has micro-batches of a size of its own; else all count as the worst"""
    micro_batches: tuple[int, ...] = Field(default=(), exclude_if=lambda sizes: not sizes)
    """of these plans: sequences in a micro-batch, by group"""
    shares: tuple[float, ...] = Field(default=(), exclude_if=lambda shares: not shares)
    """and the parts of the batch that the groups take"""


class SearchRecord(Spec):
    """How the plan was found. It has counts and no times, so that equal inputs give equal bytes.

    `stopped`: a time limit or the user ended the search early.
    """

    solver: str
    strategies: int
    relaxations: int
    programs: int
    stopped: bool = False
    idle_gpus: int = 0
    """GPUs without work, of those asked for: the step is shorter without them"""
    idle_nodes: int = 0
    """nodes without work, whose GPUs are the idle ones; 0: idle GPUs are in the only node"""
    mixes: tuple[Mix, ...] = ()
    """of a mixed cluster: every choice of groups that was planned"""

    @classmethod
    def of_all(cls, ways: int, *, stopped: bool = False) -> SearchRecord:
        """The record of an engine that tries all its ways."""
        return cls(
            solver="all ways tried", strategies=ways, relaxations=0, programs=0, stopped=stopped
        )


class Plan(Spec):
    """Everything that launching, simulating and explaining need."""

    format: Literal[7] = FORMAT
    inputs: Mapping[str, str] = Field(description="SHA-256 of each input, canonically written")
    predicted: Predicted
    strategy: Strategy
    placement: Placement
    executable: Mapping[str, bool | str]
    engine: str = "native"
    """what executes it (bigplan/engines)"""
    config: Mapping[str, Any] = {}
    """the engine's own configuration, complete, where it has one"""
    search: SearchRecord
    alternatives: tuple[Alternative, ...]
    model: ModelSpec
    training: Training
    cluster: Cluster


def digest(spec: Spec) -> str:
    """SHA-256 of a description, independent of how it was written.

    It covers only values that differ from their defaults. So a key that a later version adds does
    not change the digests of older files.
    """
    said = spec.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digests(model: ModelSpec, training: Training, cluster: Cluster) -> dict[str, str]:
    """A plan's `inputs`."""
    return {"model": digest(model), "training": digest(training), "cluster": digest(cluster)}


def graph_of(plan: Plan) -> Graph:
    """The graph of the plan's model, training and strategy."""
    gpu, chunk = plan.cluster.group.gpu, plan.placement.loss_chunk
    return graph_of_shape(RankShape.on(gpu, plan.model, plan.training, plan.strategy), chunk)


def as_groups(plan: Plan) -> tuple[Plan, ...]:
    """The plan as each group of its replicas sees it: equal work for as many nodes of its kind.

    All that a rank does follows from its group's view; which samples it takes and what is written
    of a training are the whole plan's. A plan with equal work is its only view.
    """
    strategy, cluster = plan.strategy, plan.cluster
    if not strategy.replicas:
        return (plan,)
    count = strategy.micro_batches(plan.training)
    figures = [member.figures for member in cluster.members or ()]
    views = []
    for number, group in enumerate(strategy.replicas):
        size = group.micro_batch
        batch = count * size * strategy.dp
        own = figures[number] if figures else None
        equal = {"nodes": cluster.group.nodes, "gpus_per_node": cluster.group.gpus_per_node}
        nodes = own.model_copy(update=equal) if own is not None else cluster.group
        changes = {
            "strategy": strategy.model_copy(update={"micro_batch": size, "replicas": ()}),
            "training": plan.training.model_copy(update={"global_batch": batch}),
            "cluster": cluster.model_copy(update={"node_groups": (nodes,), "members": None}),
        }
        views.append(plan.model_copy(update=changes))
    return tuple(views)


def batch_shares(strategy: Strategy) -> tuple[float, ...]:
    """The part of a batch that each group of replicas takes."""
    return tuple(
        group.number * group.micro_batch / strategy.sequences for group in strategy.replicas
    )


def as_replica(plan: Plan, replica: int) -> Plan:
    """The view of `as_groups` that a replica's ranks have."""
    return as_groups(plan)[plan.strategy.group_of(replica)]


def mfu(model: ModelSpec, training: Training, nodes: NodeGroup, seconds: float) -> float:
    """Model FLOPs utilisation: the part of the GPUs' peak that the model's own FLOPs use."""
    peak = nodes.gpus * nodes.gpu.peak(training.precision)
    return model_flops(model, training) / seconds / peak


def mfu_of(plan: Plan, seconds: float) -> float:
    """The same of a plan whose step takes so long; groups with work of their own count as such."""
    cluster, precision = plan.cluster, plan.training.precision
    utilisation = mfu(plan.model, plan.training, cluster.group, seconds)
    own = [(m.nodes, m.figures.gpu) for m in cluster.members or () if m.figures is not None]
    if not own:
        return utilisation
    mean = sum(nodes * gpu.peak(precision) for nodes, gpu in own) / cluster.group.nodes
    return utilisation * cluster.group.gpu.peak(precision) / mean


def plan_text(plan: Plan) -> str:
    """The plan as YAML."""
    data = plan.model_dump(mode="json")
    return dump_document(data)


def save_plan(plan: Plan, path: Path) -> None:
    """Write the plan. Raises InputError where the file cannot be written."""
    write_text(path, plan_text(plan), "plan")


def load_plan(path: Path) -> Plan:
    """Read a plan. Raises InputError naming file, line and rule."""
    text = read_text(path)
    written = re.match(r"format: (\d+)$", text, re.MULTILINE)
    if written is None:
        raise InputError(
            f"{path} is no plan: it has no line `format: {FORMAT}`; write one with "
            "`bigplan plan ... --out FILE`"
        )
    if int(written[1]) != FORMAT:
        raise InputError(
            f"{path}:1: the plan has format {written[1]}, this version of bigplan reads {FORMAT}; "
            "make a new one with `bigplan plan ... --out FILE`. A run that has it goes on, and is "
            "reported, with the version that wrote it"
        )
    plan = parse_document(text, Plan, str(path))
    for name, found in digests(plan.model, plan.training, plan.cluster).items():
        if plan.inputs.get(name) != found:
            raise InputError(
                f"{path}: `{name}` was changed after the plan was made (its digest differs), so "
                "the plan's decisions do not belong to it; run `bigplan plan` again"
            )
    return plan
