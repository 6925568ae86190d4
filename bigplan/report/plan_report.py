"""A plan as a person reads it in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.plan import MemoryUse, Plan
from bigplan.report.stages import TENSORS, Stage, stages_of
from bigplan.report.text import TIER_NAMES, bar, seconds_text, table
from bigplan.timeline import Timeline
from bigplan.units import format_bytes, format_count


def plan_report(plan: Plan, search_seconds: float) -> RenderableType:
    """The decision, what it promises, where everything lives, and what else was tried."""
    stages = stages_of(plan)
    parts: list[RenderableType] = [
        Text(decision(plan, stages)),
        Text(""),
        _promise(plan),
        _stage_table(stages),
        _memory_table(plan.predicted.memory),
        busy_table(plan.predicted.busy_seconds, plan.predicted.step_seconds),
    ]
    if plan.alternatives:
        parts.append(_alternatives(plan))
    parts.append(Text("\n".join(_closing(plan, search_seconds))))
    return Group(*parts)


def timeline_report(timeline: Timeline) -> RenderableType:
    """Step time and busy lanes."""
    return Group(
        Text(f"One step: {seconds_text(timeline.seconds)}"),
        busy_table(timeline.busy(), timeline.seconds),
    )


def decision(plan: Plan, stages: Sequence[Stage]) -> str:
    """The plan in one sentence."""
    group = plan.cluster.group
    where = f"{group.gpus} x {group.gpu.name}"
    if group.nodes > 1:
        where += f" ({group.nodes} nodes)"
    batch = f"{plan.training.global_batch} sequences of {plan.training.sequence_length} tokens"
    size = format_count(plan.model.parameter_count)
    return (
        f"Train {plan.model.name} ({size} parameters) on {where} "
        f"with {strategy_text(plan.strategy)}, {batch} a step in {plan.training.precision}; "
        f"{_elsewhere(plan, stages)}."
    )


def strategy_text(strategy: Strategy) -> str:
    """Degrees of parallelism in words; what is 1 or off is left out."""
    parts = [
        f"{name} {degree}"
        for name, degree in (
            ("data parallel", strategy.dp),
            ("tensor parallel", strategy.tp),
            ("pipeline", strategy.pp),
        )
        if degree > 1
    ] or ["one GPU"]
    if strategy.zero:
        parts.append(f"ZeRO {strategy.zero}")
    parts.append(f"micro-batch {strategy.micro_batch}")
    if strategy.accumulation_group > 1:
        parts.append(f"{strategy.accumulation_group} micro-batches per layer visit")
    return ", ".join(parts)


def _elsewhere(plan: Plan, stages: Sequence[Stage]) -> str:
    """What does not stay on the GPU, and what is recomputed."""
    away = [
        tensor if tensor != "optimizer" else "optimizer state"
        for tensor in TENSORS
        if any(tier != Tier.GPU for stage in stages for tier in stage.placement[tensor])
    ]
    memory = "everything stays on the GPU"
    if away:
        memory = f"off the GPU at least in part: {_list(away)}"
    again = sum(stage.recompute.get("full", 0) for stage in stages)
    if again:
        return f"{memory}; {again} of {plan.model.layers} layers are recomputed"
    return f"{memory}; nothing is recomputed"


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _promise(plan: Plan) -> RenderableType:
    predicted = plan.predicted
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    band = (
        f"{seconds_text(predicted.step_seconds_low)} if everything overlaps, "
        f"{seconds_text(predicted.step_seconds_high)} if nothing does"
    )
    table.add_row("step time", f"{seconds_text(predicted.step_seconds)}  ({band})")
    table.add_row("tokens/s", f"{predicted.tokens_per_second:,.0f}")
    table.add_row("MFU", f"{predicted.mfu:.1%}")
    table.add_row("bound by", predicted.bottleneck)
    return table


def _stage_table(stages: Sequence[Stage]) -> Table:
    """Equal neighbours share a row."""
    rows = table("Where tensors live (share of bytes)")
    for name in ("stage", "blocks", *TENSORS, "recomputed"):
        rows.add_column(name)
    numbered = groupby(enumerate(stages), key=lambda item: item[1])
    for stage, members in numbered:
        rows.add_row(
            _range([number for number, _ in members]),
            str(stage.layers),
            *(_shares(stage.placement[tensor]) for tensor in TENSORS),
            _recompute(stage),
        )
    return rows


def _shares(tiers: Mapping[str, float]) -> str:
    if len(tiers) == 1:
        return TIER_NAMES[next(iter(tiers))]
    shares = [f"{TIER_NAMES[tier]} {_percent(share)}" for tier, share in tiers.items()]
    return "\n".join(shares) or "-"


def _percent(share: float) -> str:
    """Neither 0% nor 100% is said of a part."""
    return "<1%" if share < 0.005 else ">99%" if share > 0.995 else f"{share:.0%}"


def _recompute(stage: Stage) -> str:
    again = stage.recompute.get("full", 0)
    return f"{again} of {stage.layers}" if again else "none"


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _memory_table(memory: Sequence[MemoryUse]) -> Table:
    rows = table("Memory")
    for name in ("stage", "tier", "used", "", "capacity", "of which"):
        rows.add_column(name, justify="right" if name in ("used", "capacity") else "left")
    for stages, use in _merged(memory):
        if use.used_bytes:
            rows.add_row(
                stages,
                f"{TIER_NAMES[use.tier]} per {'GPU' if use.scope == 'gpu' else 'node'}",
                format_bytes(use.used_bytes),
                bar(use.used_bytes, use.capacity_bytes),
                format_bytes(use.capacity_bytes),
                _largest(use.by_purpose),
            )
    return rows


def _merged(memory: Sequence[MemoryUse]) -> Iterator[tuple[str, MemoryUse]]:
    """Equal uses of neighbouring stages as one, tier by tier."""
    for tier in Tier:
        uses = [use for use in memory if use.tier is tier]
        for _, run in groupby(uses, key=lambda use: use.model_copy(update={"stage": 0})):
            members = list(run)
            yield _range([use.stage for use in members]), members[0]


def _largest(purposes: Mapping[str, int]) -> str:
    ordered = sorted(purposes.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in ordered)


def busy_table(busy: Mapping[str, float], step_seconds: float) -> Table:
    """Seconds each resource works during a step (of the busiest stage)."""
    rows = table("Time by resource")
    rows.add_column("resource")
    rows.add_column("busy", justify="right")
    rows.add_column("share of the step")
    for lane, seconds in sorted(busy.items(), key=lambda item: -item[1]):
        if seconds > 0:
            share = seconds / step_seconds if step_seconds else 0.0
            rows.add_row(lane, seconds_text(seconds), f"{bar(seconds, step_seconds)} {share:4.0%}")
    return rows


def _alternatives(plan: Plan) -> Table:
    rows = table("Runners-up")
    rows.add_column("strategy")
    rows.add_column("step", justify="right")
    rows.add_column("slower by", justify="right")
    rows.add_column("bound by")
    for other in plan.alternatives[:5]:
        rows.add_row(
            strategy_text(other.strategy),
            seconds_text(other.step_seconds),
            f"{other.step_seconds / plan.predicted.step_seconds - 1:.1%}",
            other.bottleneck,
        )
    return rows


def _closing(plan: Plan, search_seconds: float) -> Iterator[str]:
    predicted, record = plan.predicted, plan.search
    yield (
        f"No plan can take less than {seconds_text(predicted.lower_bound_seconds)} by this model: "
        f"the model's best is {predicted.model_gap:.1%} above that, this plan as simulated "
        f"{predicted.simulated_gap:.1%}."
    )
    yield (
        f"Searched {record.strategies} strategies ({record.relaxations} relaxed, "
        f"{record.programs} solved with {record.solver}) in {seconds_text(search_seconds)}."
    )
    native = plan.executable["native"]
    answer = "yes, with `bigplan launch`" if native is True else f"no: {native}"
    yield f"Can run here and now: {answer}."
