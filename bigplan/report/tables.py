"""Tables of a plan: seconds, memory, where tensors live, other strategies, what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bigplan.batch import LargerBatch
from bigplan.graph.graph import Recompute
from bigplan.graph.told import strategy_text
from bigplan.largest import Largest
from bigplan.placement import Tier
from bigplan.plan import Alternative, MemoryUse, Plan, Predicted, StepParts
from bigplan.report.stages import TENSORS, StageShares
from bigplan.report.text import (
    PURPOSES,
    TIER_NAMES,
    bar,
    bytes_text,
    legend,
    number_range,
    percent,
    purpose_bar,
    seconds_text,
    table,
)
from bigplan.spec.gpu import Gpu
from bigplan.units import counted, format_bytes, format_count, parse_bytes
from bigplan.whatif import Answer, Outcome, helps

TRIFLE = 1e-4  # of the step: less gets no row
NAMED = 0.005  # of the step: a resource with less of the critical path is not named
ALL = 0.995  # of the step: a resource with more of the critical path has all of it
# The next resource to bind is named too. Its busy seconds must exceed NEARLY of those that the
# binding resource has on the critical path. Less than MUCH of its own seconds may be on the path.
NEARLY = 0.9
MUCH = 0.5


def bound_text(predicted: Predicted) -> str:
    """What the step is bound by: resources on its critical path, with their seconds.

    For example "nvme write, 14.2 s of 19.6 s of the critical path (72%); gpu compute 5.1 s". A
    resource that works nearly as long off the path is named too, because it would bind next.
    """
    path, step = predicted.critical_path, predicted.step_seconds
    most = path[predicted.bottleneck]
    share = f"{seconds_text(most)} of {seconds_text(step)} of the critical path"
    first = f"{share} ({percent(most / step)})" if most < ALL * step else "all of the critical path"
    busy = {
        name: seconds
        for name, seconds in predicted.busy_seconds.items()
        if seconds > NEARLY * most and path.get(name, 0.0) < MUCH * seconds
    }
    others = {
        name: f"{name} {seconds_text(seconds)}"
        for name, seconds in path.items()
        if name != predicted.bottleneck and seconds > NAMED * step
    }
    for name, seconds in busy.items():
        how = "longer" if seconds > most else "nearly as long"
        beside = f"{name} works {how} beside it ({seconds_text(seconds)})"
        if name in others:
            beside = f"{others[name]}, busy {seconds_text(seconds)} in all"
        others[name] = beside
    return "; ".join([f"{predicted.bottleneck}, {first}", *others.values()])


def busy_table(busy: Mapping[str, float], path: Mapping[str, float], step_seconds: float) -> Table:
    """A row per resource: its busy seconds in a step, and its seconds on the critical path.

    Busy seconds are those of the stage where the resource works most. The resource with most
    seconds on the critical path binds.
    """
    columns = ("resource", "busy", "share of the step", "critical path", "")
    rows = table("Time by resource", *columns, right=("busy", "critical path"))
    binding = max(path, key=lambda name: path[name], default="")
    least = TRIFLE * step_seconds
    shown = {name: (path.get(name, 0.0), seconds) for name, seconds in busy.items()}
    shown = {name: both for name, both in shown.items() if max(both) > least}
    for name in sorted(shown, key=lambda name: shown[name], reverse=True):
        on_path, seconds = shown[name]
        share = seconds / step_seconds if step_seconds else 0.0
        rows.add_row(
            name,
            seconds_text(seconds),
            f"{bar(seconds, step_seconds)} {share:4.0%}",
            seconds_text(on_path) if on_path > least else "-",
            "binds" if name == binding else "",
        )
    return rows


def part_seconds(parts: StepParts) -> dict[str, float]:
    """The parts of a step by the names that the user reads, in the order of StepParts."""
    waits = f"waiting ({parts.waits_for} is busiest)" if parts.waits_for else "waiting"
    return {
        "compute": parts.compute,
        "recomputation": parts.recompute,
        "collectives within layers": parts.collectives,
        "optimizer and norms on the GPU": parts.update,
        "pipeline bubble": parts.bubble,
        waits: parts.waiting,
    }


def parts_table(parts: StepParts) -> Table:
    """The step of the busiest GPU by parts, without parts that take next to no time."""
    rows = table("The step of the busiest GPU", "part", "seconds", "share", right=("seconds",))
    named = part_seconds(parts)
    whole = sum(named.values())
    for name, seconds in named.items():
        if seconds > TRIFLE * whole:
            share = f"{bar(seconds, whole)} {seconds / whole:4.0%}"
            rows.add_row(name, seconds_text(seconds), share)
    return rows


ROWS_SHOWN = 9  # at most, of a tier
HARDLY = 1e-3  # of the used bytes: a purpose with less is not named
NOTHING = 1 << 20  # bytes: a tier with less in use gets no row, unless it is the GPU

TableRow = tuple[str, MemoryUse]


def memory_table(memory: Sequence[MemoryUse]) -> Table:
    """A row with a bar per tier and stage; neighbouring stages with equal use share a row."""
    shown = [use for use in memory if use.tier is Tier.GPU or use.used_bytes >= NOTHING]
    purposes = {p for use in shown for p, n in use.by_purpose.items() if n}
    title = f"Memory of one GPU; host and NVMe of one node ({legend(sorted(purposes))})"
    bar, used = "", "used"
    rows = table(title, "stage", "tier", bar, used, "by purpose", right=(used,), whole=(bar, used))
    for tier in Tier:
        uses = [use for use in shown if use.tier is tier]
        for stages, use in _shortened(list(_merged(uses))):
            rows.add_row(
                stages,
                TIER_NAMES[tier],
                purpose_bar(use.by_purpose, use.capacity_bytes),
                *_amounts(use),
            )
    return rows


def kept_back(memory: Sequence[MemoryUse], gpu: Gpu) -> str:
    """Why less of a GPU's memory is for tensors than it has; stages differ by their page tables."""
    rest = [gpu.memory - use.capacity_bytes for use in memory if use.tier is Tier.GPU]
    least, most = bytes_text(min(rest)), bytes_text(max(rest))
    told = least if least == most else f"{least} to {most}"
    return (
        f"Of a GPU's {bytes_text(gpu.memory)} its context, communicators, page tables and the "
        f"allocator, which needs room for the largest tensor in one piece, have {told}."
    )


def _merged(uses: Sequence[MemoryUse]) -> Iterator[TableRow]:
    for _, run in groupby(uses, key=lambda use: use.model_copy(update={"stage": 0})):
        members = list(run)
        yield number_range([use.stage for use in members]), members[0]


def _shortened(rows: Sequence[TableRow]) -> Sequence[TableRow]:
    """The rows; in a long pipeline only those of the first stages, the fullest and the last."""
    if len(rows) <= ROWS_SHOWN:
        return rows
    fullest = max(rows, key=lambda row: row[1].used_bytes)
    wanted = [*rows[: ROWS_SHOWN - 2], fullest, rows[-1]]
    return [row for row in rows if row in wanted]


def _amounts(use: MemoryUse) -> tuple[str, str]:
    """Texts of the used bytes and the capacity, and of the bytes by purpose, largest first."""
    unit = format_bytes(use.used_bytes).split()[1]
    size = parse_bytes(f"1 {unit}")
    used, capacity = use.used_bytes / size, use.capacity_bytes / size
    if capacity < 1024:
        told = f"{used:.3g} of {capacity:.3g} {unit}"
    else:
        told = f"{used:.3g} {unit} of {format_bytes(use.capacity_bytes)}"
    ordered = sorted(use.by_purpose.items(), key=lambda item: -item[1])
    ordered = [(name, n) for name, n in ordered if n > HARDLY * use.used_bytes]
    parts = [f"{PURPOSES[name][0]} {_two_digits(nbytes / size)}" for name, nbytes in ordered]
    return told, ", ".join(parts)


def _two_digits(amount: float) -> str:
    """The amount with two significant digits, or as a whole number from 100 on: 1.1, 36, 116."""
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.2g}"


POLICIES = {
    str(Recompute.NONE): "kept",
    str(Recompute.SELECTIVE): "recomputed selectively",
    str(Recompute.MLP): "recomputed in the MLP",
    str(Recompute.FULL): "recomputed",
}


def homes_table(stages: Sequence[StageShares]) -> Table:
    """A row per kind of tensor; neighbouring stages with equal counts share their rows."""
    used = [tier for tier in Tier if any(tier in s.homes[t] for s in stages for t in TENSORS)]
    per = {
        tier: f"{TIER_NAMES[tier]}, per {'GPU' if tier is Tier.GPU else 'node'}" for tier in used
    }
    title = "Where tensors live (layers with embedding and head; activations: blocks)"
    rows = table(title, "stage", "tensors", *per.values())
    for _, run in groupby(enumerate(stages), key=lambda item: _counts(item[1])):
        members = list(run)
        numbers, alike = [n for n, _ in members], [stage for _, stage in members]
        for tensor in TENSORS:
            if not any(stage.homes[tensor] for stage in alike):
                continue  # of frozen layers
            stage = number_range(numbers) if tensor == TENSORS[0] else ""
            rows.add_row(stage, tensor, *(_cell(alike, tensor, tier) for tier in used))
    return rows


def _counts(stage: StageShares) -> list[tuple[str, str, float, str]]:
    """The counts by which stages are compared. Bytes are left out: they fall along the pipeline."""
    return [
        (tensor, tier, home.layers, _amount(stage, tensor, tier))
        for tensor in TENSORS
        for tier, home in stage.homes[tensor].items()
    ]


def _cell(stages: Sequence[StageShares], tensor: str, tier: str) -> str:
    homes = [stage.homes[tensor][tier] for stage in stages if tier in stage.homes[tensor]]
    if not homes:
        return "-"
    told = _amount(stages[0], tensor, tier)
    if tensor == "parameters" and not any(home.nbytes for home in homes):
        return f"{told}: the optimizer's fp32 copies"  # FSDP2 has no others between uses
    told += f": {_range([home.nbytes for home in homes])}"
    streamed = [home.streamed_bytes for home in homes]
    if any(streamed):
        told += f", {_range(streamed)} streamed"
    return told


def _range(nbytes: Sequence[float]) -> str:
    least, most = min(nbytes), max(nbytes)
    return bytes_text(most) if least == most else f"{bytes_text(least)} - {bytes_text(most)}"


def _amount(stage: StageShares, tensor: str, tier: str) -> str:
    home = stage.homes[tensor][tier]
    if tensor == "activations":
        return ", ".join(f"{count} {POLICIES[policy]}" for policy, count in home.recompute.items())
    counts = [other.layers for other in stage.homes[tensor].values()]
    if any(count != round(count) for count in counts):  # optimizer state, split within layers
        return percent(stage.placement[tensor].get(tier, 0.0))
    return "all" if len(counts) == 1 else f"{home.layers:.0f} of {sum(counts):.0f}"


RIVALS_SHOWN = 5
TOLD = 2  # parts named per runner-up, at most
EQUAL = 5e-4  # of the step: a smaller difference is none
WORTH = 0.15  # of the difference: a part that grows by less does not explain it


def rivals_table(plan: Plan) -> Table:
    """The best plans of other strategies, fastest first."""
    rows = table(
        "Runners-up", "strategy", "step", "slower by", "because of", right=("step", "slower by")
    )
    for other in plan.alternatives[:RIVALS_SHOWN]:
        rows.add_row(
            strategy_text(other.strategy),
            seconds_text(other.step_seconds),
            # Rounded first, so that 0.0 takes the sign from a rest below zero.
            f"{round(other.step_seconds / plan.predicted.step_seconds - 1, 3) + 0.0:.1%}",
            why_slower(plan, other),
        )
    return rows


def why_slower(plan: Plan, other: Alternative) -> str:
    """The parts of the step that grow most, and the one that shrinks most, in seconds."""
    lost = other.step_seconds - plan.predicted.step_seconds
    if abs(lost) < EQUAL * plan.predicted.step_seconds:
        return "next to no difference"
    if lost < 0:
        return "about as fast, but not as simple"
    changes = _changes(plan.predicted.parts, other.parts)
    slower = [(s, name) for s, name in changes if s > max(0.0, WORTH * lost)][:TOLD]
    if not slower:
        return "no single part"
    text = ", ".join(f"{name} +{seconds_text(s)}" for s, name in slower)
    saved, name = changes[-1]
    if -saved > WORTH * slower[0][0]:
        text += f", but {name} -{seconds_text(-saved)}"
    return text


def _changes(best: StepParts, other: StepParts) -> Sequence[tuple[float, str]]:
    """Differences of the parts in seconds, largest loss first.

    The name of the waiting part depends on the plan. It is taken from the plan that waits longer.
    """
    pairs = zip(part_seconds(best).items(), part_seconds(other).items(), strict=True)
    return sorted(
        ((b - a, name if b > a else before) for (before, a), (name, b) in pairs), reverse=True
    )


def help_report(answer: Answer) -> RenderableType:
    """A larger batch, a row per change that was solved, and the names of unsolved changes."""
    parts: list[RenderableType] = [Text(batch_text(answer.batch))] if answer.batch else []
    if answer.outcomes:
        parts.append(help_table(answer.outcomes))
    if answer.unasked:
        parts.append(Text(unasked_text(answer.unasked)))
    return Group(*parts)


def help_table(outcomes: Sequence[Outcome]) -> Table:
    """A row per change that was solved."""
    rows = table("What would help (solved again)", "change", "step", "then bound by")
    for outcome in outcomes:
        rows.add_row(outcome.change, step_text(outcome), outcome.bottleneck or "-")
    return rows


def step_text(outcome: Outcome) -> str:
    """'3.3 s -> 2.6 s (x1.27)', or that the change makes the plan fit, or does not help."""
    before, after = outcome.before_seconds, outcome.step_seconds
    if after is None:
        return "still does not fit" if before is None else "cannot be planned as it stands"
    if before is None:
        return f"fits: step {seconds_text(after)}"
    if not helps(outcome):
        return f"no faster ({seconds_text(after)})"
    return f"{seconds_text(before)} -> {seconds_text(after)} (x{before / after:.2f})"


def batch_text(batch: LargerBatch) -> str:
    """What a larger batch brings, and the strategy for it."""
    gained = f"{'at least ' * batch.at_least}{percent(batch.gain)}"
    return (
        f"{counted(batch.global_batch, 'sequence')} a step in place of {batch.instead_of:,} give "
        f"{gained} more tokens a second, solved again (--global-batch {batch.global_batch}): a "
        f"step of {seconds_text(batch.step_seconds)} with {strategy_text(batch.strategy)}."
    )


SUBJECTS = {
    "sequence_length": "tokens in a sequence",
    "layers": "layers of this kind",
    "micro_batch": "sequences that a GPU computes at once",
}


def largest_table(found: Sequence[Largest]) -> Table:
    """A row per question: the plan's value, the largest that fits, and one that does not fit."""
    figures = ("the plan has", "fits", "does not fit", "step, untuned")
    rows = table("The largest that fits, all else as it is", "what", *figures, right=figures)
    for one in found:
        grown = one.subject == "layers" and one.value != one.now
        size = f" ({format_count(one.parameters)} parameters)" if grown else ""
        beyond = "-" if one.next is None else f"{one.next:,}"
        step = _untuned(one.step_seconds, one.tokens_per_step)
        rows.add_row(SUBJECTS[one.subject], f"{one.now:,}", f"{one.value:,}{size}", beyond, step)
    return rows


def _untuned(seconds: float | None, tokens: int | None) -> str:
    """A step's time beside its tokens, which differ from row to row."""
    if seconds is None or tokens is None:
        return "-"
    return f"{seconds_text(seconds)} for {format_count(float(f'{tokens:.3g}'))} tokens"


def unasked_text(changes: Sequence[str]) -> str:
    """The changes that there was no time for."""
    return f"Would this help? {'; '.join(changes)}: `--what-if` solves again with each."
