"""From a placement back to the values of the problem's variables: for pinning and exact search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.placement import KindPlacement, Placement, Rings, Tier
from bigplan.solve.linear import Linear, Rule
from bigplan.solve.memory import size_rules
from bigplan.solve.stage import StageClass, stage_classes, switch_rules


def decisions_of(graph: Graph, placement: Placement) -> dict[str, float]:
    """Every variable's value; switches and sizes are the least that the rules allow."""
    values: dict[str, float] = {}
    for stage in stage_classes(graph, Rings.of(placement)):
        kinds = placement.stages[stage.stages[0]].kinds
        for kind, _ in stage.kinds:
            values.update(_counts(stage, kind, kinds[kind.name]))
        for rule in (*switch_rules(stage), *size_rules(stage)):
            name, least = _least(rule, values)
            values[name] = max(values.get(name, 0.0), least)
    return values


def _counts(
    stage: StageClass, kind: LayerKind, placed: KindPlacement
) -> Iterator[tuple[str, float]]:
    yield from _valued(stage.streamed(kind), placed.streamed)
    on_host = (placed.parameters.get(Tier.HOST, 0), placed.gradients.get(Tier.HOST, 0))
    yield from _valued(stage.looked_up(kind), min(on_host))
    for tier in Tier:
        for tensor, number in (
            ("parameters", placed.parameters.get(tier, 0)),
            ("gradients", placed.gradients.get(tier, 0)),
            ("optimizer", placed.optimizer.get(tier, 0.0)),
        ):
            yield from _valued(stage.tensor(kind, tensor, tier), number)
        for recompute in Recompute:
            number = placed.activations.get(recompute, {}).get(tier, 0)
            yield from _valued(stage.policy(kind, recompute, tier), number)
    yield from _without_home(stage, kind, placed)


def _without_home(
    stage: StageClass, kind: LayerKind, placed: KindPlacement
) -> Iterator[tuple[str, float]]:
    """Layers whose activations stay in their ring, or lie in the place of gradients."""
    lent = placed.gradients.get(Tier.HOST, 0)
    for recompute in Recompute:  # those that keep the most come first, see layer_table
        tiers = placed.activations.get(recompute, {})
        left = tiers.get(Tier.HOST, 0)
        shares, stays = stage.in_gradients(kind, recompute), stage.stays(kind, recompute)
        staying = int(bool(stays.terms)) if left and not tiers.get(Tier.NVME, 0) else 0
        if shares.terms:
            staying = min(staying, lent)
            sharing = min(lent, left) - staying
            lent -= staying + sharing
            yield from _valued(shares, sharing)
        yield from _valued(stays, staying)


def _valued(decision: Linear, number: float) -> Iterator[tuple[str, float]]:
    """The decision's variable, if it has one, with its value."""
    return ((name, float(number)) for name in decision.terms)


def _least(rule: Rule, values: Mapping[str, float]) -> tuple[str, float]:
    """The rule's last variable, a switch or a size, at the least value the rule allows."""
    *others, (name, factor) = rule.expression.terms.items()
    rest = rule.expression.constant + sum(c * values[n] for n, c in others)
    needed = max(0.0, rest / -factor)
    if ".has." in name:
        return name, float(needed > 1e-9)
    return name, needed
