"""Values of the problem's variables: those of a placement, and what follows from choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.placement import KindPlacement, Placement, Rings, Tier
from bigplan.solve.linear import Linear, Rule
from bigplan.solve.memory import size_rules
from bigplan.solve.stage import StageClass, stage_classes, switch_rules

Values = dict[str, float]


def decisions_of(graph: Graph, placement: Placement) -> Values:
    """Every variable's value; switches and sizes are the least that the rules allow."""
    stages = stage_classes(graph, Rings.of(placement))
    values: Values = {}
    for stage in stages:
        kinds = placement.stages[stage.stages[0]].kinds
        for kind, _ in stage.kinds:
            values.update(_counts(stage, kind, kinds[kind.name]))
    Consequences.of(stages).complete(values)
    return values


def _counts(
    stage: StageClass, kind: LayerKind, placed: KindPlacement
) -> Iterator[tuple[str, float]]:
    yield from _valued(stage.streamed(kind), placed.streamed)
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


@dataclass(frozen=True, slots=True)
class Consequences:
    """What follows from the counts of tensors and policies: rings, sizes, what has no home."""

    stages: tuple[StageClass, ...]
    rules: tuple[Rule, ...]  # in the order in which they follow from each other

    @classmethod
    def of(cls, stages: tuple[StageClass, ...]) -> Consequences:
        """Those of these stages."""
        rules = (rule for stage in stages for rule in (*switch_rules(stage), *size_rules(stage)))
        return cls(stages, tuple(rules))

    def complete(self, values: Values) -> None:
        """Set all that follows, to the least that the rules allow."""
        for stage in self.stages:
            for kind, _ in stage.kinds:
                homes = [stage.tensor(kind, t, Tier.HOST) for t in ("parameters", "gradients")]
                for name in stage.looked_up(kind).terms:
                    values[name] = min(home.at(values) for home in homes)
                values.update(_without_home(stage, kind, values))
        for rule in self.rules:
            values[_derived(rule)] = 0.0
        for rule in self.rules:
            name, least = _derived(rule), _least(rule, values)
            values[name] = max(values[name], least)


def _without_home(
    stage: StageClass, kind: LayerKind, values: Values
) -> Iterator[tuple[str, float]]:
    """Layers whose activations stay in their ring, or lie in the place of gradients."""
    lent = stage.tensor(kind, "gradients", Tier.HOST).at(values)
    for recompute in Recompute:  # those that keep the most come first, see layer_table
        left, on_disk = (
            stage.policy(kind, recompute, t).at(values) for t in (Tier.HOST, Tier.NVME)
        )
        shares, stays = stage.in_gradients(kind, recompute), stage.stays(kind, recompute)
        staying = float(bool(stays.terms)) if left and not on_disk else 0.0
        if shares.terms:
            staying = min(staying, lent)
            sharing = min(lent, left) - staying
            lent -= staying + sharing
            yield from _valued(shares, sharing)
        yield from _valued(stays, staying)


def _valued(decision: Linear, number: float) -> Iterator[tuple[str, float]]:
    """The decision's variable, if it has one, with its value."""
    return ((name, float(number)) for name in decision.terms)


def _derived(rule: Rule) -> str:
    """The rule's last variable, a switch or a size."""
    return next(reversed(list(rule.expression.terms)))


def _least(rule: Rule, values: Values) -> float:
    """The least value of the rule's last variable that it allows."""
    *others, (name, factor) = rule.expression.terms.items()
    rest = rule.expression.constant + sum(c * values[n] for n, c in others)
    needed = max(0.0, rest / -factor)
    return float(needed > 1e-9) if ".has." in name else needed
