"""Values of the problem's variables: those of a placement, and what follows from choices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.placement import KindPlacement, Placement, Rings
from bigplan.solve.linear import EXACT, Linear, Rule
from bigplan.solve.memory import size_rules
from bigplan.solve.stage import StageClass, placement_rules, stage_classes, switch_rules

Values = dict[str, float]


def decisions_of(graph: Graph, placement: Placement) -> Values:
    """Every variable's value; switches and sizes are the least that the rules allow."""
    return Consequences.of(stage_classes(graph, Rings.of(placement))).decisions(placement)


def decided(
    stage: StageClass, kind: LayerKind, placed: KindPlacement
) -> Iterator[tuple[str, Linear, float]]:
    """Every count by its key in a plan, with the expression that stands for it."""
    for (name, *places), decision in stage.decisions(kind):
        found = getattr(placed, name)
        for place in places:
            found = found.get(place, {})
        yield ".".join((name, *places)), decision, found or 0.0


@dataclass(frozen=True, slots=True)
class Consequences:
    """What follows from the counts of tensors and policies: rings, sizes, what has no home."""

    stages: tuple[StageClass, ...]
    followers: tuple[_Follower, ...]  # in the order in which they follow from each other

    @classmethod
    def of(cls, stages: tuple[StageClass, ...]) -> Consequences:
        """The consequences for these stages."""
        followers = list[_Follower]()
        for stage in stages:
            looked_up = (stage.looked_up(kind) for kind, _ in stage.kinds)
            # Of policies those that keep the most first, and what stays in its ring before others.
            homeless = (
                decision
                for kind, _ in stage.kinds
                for recompute in Recompute
                for decision in (stage.stays(kind, recompute), stage.in_gradients(kind, recompute))
            )
            placing = list(placement_rules(stage))
            followers += (_Follower.most(name, placing) for d in looked_up for name in d.terms)
            followers += map(_Follower.least, (*switch_rules(stage), *size_rules(stage)))
            followers += (_Follower.most(name, placing) for d in homeless for name in d.terms)
        return cls(stages, tuple(followers))

    def decisions(self, placement: Placement) -> Values:
        """A placement's decisions, with the stages' rings."""
        values: Values = {}
        for stage in self.stages:
            kinds = placement.stages[stage.stages[0]].kinds
            for kind, _ in stage.kinds:
                for _, decision, layers in decided(stage, kind, kinds[kind.name]):
                    values.update((name, float(layers)) for name in decision.terms)
        self.complete(values)
        return values

    def complete(self, values: Values) -> None:
        """Set all that follows: sizes to the least that the rules allow, the rest to the most."""
        for follower in self.followers:
            values[follower.name] = 0.0
        for follower in self.followers:
            follower.follow(values)


@dataclass(frozen=True, slots=True)
class _Follower:
    """A variable that rules hold to a least value (a switch or a size), or to a most."""

    name: str
    limits: tuple[Linear, ...]  # that the rules set it, where all other variables are known
    is_least: bool

    @classmethod
    def least(cls, rule: Rule) -> _Follower:
        """Of a rule's last variable; other rules may ask for more of it."""
        name = list(rule.expression.terms)[-1]
        return cls(name, (_limit(rule, name),), is_least=True)

    @classmethod
    def most(cls, name: str, rules: Iterable[Rule]) -> _Follower:
        """Of a variable that all these rules limit."""
        limiting = (rule for rule in rules if rule.expression.terms.get(name, 0.0) > 0)
        return cls(name, tuple(_limit(rule, name) for rule in limiting), is_least=False)

    def follow(self, values: Values) -> None:
        """Set it."""
        limits = [limit.at(values) for limit in self.limits]
        if not self.is_least:
            values[self.name] = max(0.0, min(limits))
        elif (needed := limits[0]) > values[self.name]:
            is_switch = ".has." in self.name
            values[self.name] = float(needed > EXACT) if is_switch else needed


def _limit(rule: Rule, name: str) -> Linear:
    """What the rule, at its limit, says of a variable by the others."""
    factor = rule.expression.terms[name]
    return rule.expression.without((name,)) * (-1.0 / factor)
