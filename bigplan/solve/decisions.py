"""Values of the problem's variables: those of a placement, and what follows from choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.placement import KindPlacement, Placement, Rings, Tier
from bigplan.solve.linear import Linear, Rule
from bigplan.solve.memory import size_rules
from bigplan.solve.stage import StageClass, stage_classes, switch_rules, table_homes

Values = dict[str, float]


def decisions_of(graph: Graph, placement: Placement) -> Values:
    """Every variable's value; switches and sizes are the least that the rules allow."""
    return Consequences.of(stage_classes(graph, Rings.of(placement))).decisions(placement)


def decided(
    stage: StageClass, kind: LayerKind, placed: KindPlacement
) -> Iterator[tuple[str, Linear, float]]:
    """Every count by its key in a plan, with the expression that stands for it."""
    for tier in Tier:
        for tensor, counts in (
            ("parameters", placed.parameters),
            ("gradients", placed.gradients),
            ("optimizer", placed.optimizer),
        ):
            yield f"{tensor}.{tier}", stage.tensor(kind, tensor, tier), counts.get(tier, 0)
        for recompute in Recompute:
            layers = placed.activations.get(recompute, {}).get(tier, 0)
            key = f"activations.{recompute}.{tier}"
            yield key, stage.policy(kind, recompute, tier), layers
    yield "streamed", stage.streamed(kind), placed.streamed


@dataclass(frozen=True, slots=True)
class Consequences:
    """What follows from the counts of tensors and policies: rings, sizes, what has no home."""

    stages: tuple[StageClass, ...]
    homeless: tuple[_Homeless, ...]
    followers: tuple[_Follower, ...]  # in the order in which they follow from each other

    @classmethod
    def of(cls, stages: tuple[StageClass, ...]) -> Consequences:
        """The consequences for these stages."""
        rules = (rule for stage in stages for rule in (*switch_rules(stage), *size_rules(stage)))
        homeless = (_Homeless.of(stage, kind) for stage in stages for kind, _ in stage.kinds)
        return cls(stages, tuple(homeless), tuple(map(_Follower.of, rules)))

    def decisions(self, placement: Placement) -> Values:
        """A placement's decisions, with the stages' rings."""
        values: Values = {}
        for stage in self.stages:
            kinds = placement.stages[stage.stages[0]].kinds
            for kind, _ in stage.kinds:
                for _, decision, layers in decided(stage, kind, kinds[kind.name]):
                    values.update(_valued(decision, layers))
        self.complete(values)
        return values

    def complete(self, values: Values) -> None:
        """Set all that follows, to the least that the rules allow."""
        for kind in self.homeless:
            kind.complete(values)
        for follower in self.followers:
            values[follower.name] = 0.0
        for follower in self.followers:
            values[follower.name] = max(values[follower.name], follower.least(values))


@dataclass(frozen=True, slots=True)
class _Homeless:
    """A kind's rows looked up in host memory, and layers whose activations need no home."""

    homes: tuple[Linear, ...]  # of parameters and gradients, in host memory
    looked_up: tuple[str, ...]
    # By recomputation, those that keep the most first, see layer_table: what is in host memory and
    # on disk, what lies in the place of gradients, and whether it stays in its ring.
    policies: tuple[tuple[Linear, Linear, Linear, Linear], ...]

    @classmethod
    def of(cls, stage: StageClass, kind: LayerKind) -> _Homeless:
        homes = table_homes(stage, kind)
        policies = (
            (
                stage.policy(kind, recompute, Tier.HOST),
                stage.policy(kind, recompute, Tier.NVME),
                stage.in_gradients(kind, recompute),
                stage.stays(kind, recompute),
            )
            for recompute in Recompute
        )
        return cls(tuple(homes), tuple(stage.looked_up(kind).terms), tuple(policies))

    def complete(self, values: Values) -> None:
        """Set what is looked up, what stays in its ring and what lies in gradients' place."""
        for name in self.looked_up:
            values[name] = min(home.at(values) for home in self.homes)
        lent = self.homes[-1].at(values)
        for moved, disk, shares, stays in self.policies:
            left, on_disk = moved.at(values), disk.at(values)
            staying = float(bool(stays.terms)) if left and not on_disk else 0.0
            if shares.terms:
                staying = min(staying, lent)
                sharing = min(lent, left) - staying
                lent -= staying + sharing
                values.update(_valued(shares, sharing))
            values.update(_valued(stays, staying))


def _valued(decision: Linear, number: float) -> Iterator[tuple[str, float]]:
    """The decision's variable, if it has one, with its value."""
    return ((name, float(number)) for name in decision.terms)


@dataclass(frozen=True, slots=True)
class _Follower:
    """A rule's last variable, a switch or a size, which the rule holds to a least value."""

    name: str
    factor: float
    constant: float
    others: tuple[tuple[str, float], ...]
    is_switch: bool

    @classmethod
    def of(cls, rule: Rule) -> _Follower:
        *others, (name, factor) = rule.expression.terms.items()
        return cls(name, factor, rule.expression.constant, tuple(others), ".has." in name)

    def least(self, values: Values) -> float:
        """The least value that the rule allows."""
        rest = self.constant + sum(c * values[n] for n, c in self.others)
        needed = max(0.0, rest / -self.factor)
        return float(needed > 1e-9) if self.is_switch else needed
