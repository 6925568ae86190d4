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

    homes: tuple[_Homes, ...]
    rules: tuple[_Least, ...]  # in the order in which they follow from each other

    @classmethod
    def of(cls, stages: tuple[StageClass, ...]) -> Consequences:
        """Those of these stages."""
        homes = (_Homes.of(stage, kind) for stage in stages for kind, _ in stage.kinds)
        rules = (rule for stage in stages for rule in (*switch_rules(stage), *size_rules(stage)))
        return cls(tuple(homes), tuple(_Least.of(rule) for rule in rules))

    def complete(self, values: Values) -> None:
        """Set all that follows, to the least that the rules allow."""
        for each in self.homes:
            each.complete(values)
        for rule in self.rules:
            values[rule.name] = 0.0
        for rule in self.rules:
            values[rule.name] = max(values[rule.name], rule.at(values))


@dataclass(frozen=True, slots=True)
class _Homes:
    """Of a kind: where tensors in host memory are, and what has no home of its own there."""

    parameters: Linear
    gradients: Linear
    looked_up: Linear
    # By way to keep activations, those that keep the most first, see layer_table: layers in host
    # memory, on NVMe, in the place of gradients, and whether one stays in its ring.
    kept: tuple[tuple[Linear, Linear, Linear, Linear], ...]

    @classmethod
    def of(cls, stage: StageClass, kind: LayerKind) -> _Homes:
        parameters, gradients = (
            stage.tensor(kind, tensor, Tier.HOST) for tensor in ("parameters", "gradients")
        )
        kept = (
            (
                stage.policy(kind, recompute, Tier.HOST),
                stage.policy(kind, recompute, Tier.NVME),
                stage.in_gradients(kind, recompute),
                stage.stays(kind, recompute),
            )
            for recompute in Recompute
        )
        return cls(
            parameters,
            gradients,
            stage.looked_up(kind),
            tuple(k for k in kept if k[2].terms or k[3].terms),
        )

    def complete(self, values: Values) -> None:
        lent = self.gradients.at(values)
        for name in self.looked_up.terms:
            values[name] = min(self.parameters.at(values), lent)
        for on_host, on_disk, shares, stays in self.kept:
            left = on_host.at(values)
            staying = float(bool(stays.terms and left and not on_disk.at(values)))
            if shares.terms:
                staying = min(staying, lent)
                sharing = min(lent, left) - staying
                lent -= staying + sharing
                values.update(_valued(shares, sharing))
            values.update(_valued(stays, staying))


@dataclass(frozen=True, slots=True)
class _Least:
    """The least value of a rule's last variable, a switch or a size, that the rule allows."""

    name: str
    needed: Linear
    switch: bool

    @classmethod
    def of(cls, rule: Rule) -> _Least:
        *others, (name, factor) = rule.expression.terms.items()
        needed = Linear(dict(others), rule.expression.constant) * (-1 / factor)
        return cls(name, needed, ".has." in name)

    def at(self, values: Values) -> float:
        needed = max(0.0, self.needed.at(values))
        return float(needed > 1e-9) if self.switch else needed


def _valued(decision: Linear, number: float) -> Iterator[tuple[str, float]]:
    """The decision's variable, if it has one, with its value."""
    return ((name, float(number)) for name in decision.terms)
