"""Where every kind of tensor lives: layers and bytes by tier."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from bigplan.graph.graph import Recompute
from bigplan.placement import Tier
from bigplan.report.stages import TENSORS, Home, Stage
from bigplan.report.text import TIER_NAMES, bytes_text, number_range, percent, table

POLICIES = {
    str(Recompute.NONE): "kept",
    str(Recompute.SELECTIVE): "recomputed selectively",
    str(Recompute.MLP): "recomputed in the MLP",
    str(Recompute.FULL): "recomputed",
}


def homes_table(stages: Sequence[Stage]) -> Table:
    """A row per tensor kind; neighbouring stages that place the same counts share it."""
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
            stage = number_range(numbers) if tensor == TENSORS[0] else ""
            rows.add_row(stage, tensor, *(_cell(alike, tensor, tier) for tier in used))
    return rows


def _counts(stage: Stage) -> list[tuple[str, str, float, tuple[tuple[str, int], ...]]]:
    """What makes stages alike: their counts, not their bytes, which fall along the pipeline."""
    return [
        (tensor, tier, home.layers, tuple(home.recompute.items()))
        for tensor in TENSORS
        for tier, home in stage.homes[tensor].items()
    ]


def _cell(stages: Sequence[Stage], tensor: str, tier: str) -> str:
    homes = [stage.homes[tensor][tier] for stage in stages if tier in stage.homes[tensor]]
    if not homes:
        return "-"
    told = f"{_amount(stages[0], tensor, homes[0])}: {_range([home.nbytes for home in homes])}"
    streamed = [home.streamed * home.nbytes for home in homes]
    if any(streamed):
        told += f", {_range(streamed)} streamed"
    return told


def _range(nbytes: Sequence[float]) -> str:
    least, most = min(nbytes), max(nbytes)
    return bytes_text(most) if least == most else f"{bytes_text(least)} - {bytes_text(most)}"


def _amount(stage: Stage, tensor: str, home: Home) -> str:
    if tensor == "activations":
        return ", ".join(f"{count} {POLICIES[policy]}" for policy, count in home.recompute.items())
    whole = sum(other.layers for other in stage.homes[tensor].values())
    if home.layers != round(home.layers):  # shares of optimizer state are no whole layers
        return percent(home.layers / whole)
    return "all" if home.layers == whole else f"{home.layers:.0f} of {whole:.0f}"
