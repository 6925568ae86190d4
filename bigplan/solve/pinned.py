"""What pins leave to choose in a class of stages, for bounds without variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigplan.cost import Costs
from bigplan.graph.graph import LayerKind, Recompute
from bigplan.placement import Tier
from bigplan.solve.memory import gradient_bytes, owned, weight_bytes
from bigplan.solve.pins import Pin, pin_rules
from bigplan.solve.stage import AWAY, StageClass

ROUNDING = 1e-9  # layers


@dataclass(frozen=True, slots=True)
class Pinned:
    """A class of stages and the rules of its pins."""

    stage: StageClass
    sums: Mapping[frozenset[str], float]  # layers that these decisions add up to
    contradicted: bool  # by what the strategy decides

    @classmethod
    def of(cls, stage: StageClass, pins: tuple[Pin, ...]) -> Pinned:
        """With the pins that concern it. Raises InputError where one names no layer kind."""
        rules = [rule.expression for rule in pin_rules(stage, pins)]
        return cls(
            stage=stage,
            sums={frozenset(rule.terms): -rule.constant for rule in rules if rule.terms},
            contradicted=any(abs(r.constant) > ROUNDING for r in rules if not r.terms),
        )

    def layers(self, kind: LayerKind, tensor: str, tier: Tier) -> float:
        """Layers of the kind whose `tensor` is pinned to `tier`, or has no other left."""
        if not self.sums or self.stage.resident(kind, tensor):
            return 0.0
        where = {t: frozenset(self.stage.tensor(kind, tensor, t).terms) for t in Tier}
        others = [
            self.sums[names] for t, names in where.items() if t != tier and names in self.sums
        ]
        rest = self.stage.count(kind) - sum(others) if len(others) == len(Tier) - 1 else 0.0
        return max(self.sums.get(where[tier], 0.0), rest)

    def leaving(self, kind: LayerKind, tensor: str) -> float:
        """Layers of the kind whose `tensor` may leave the GPU; what the GPU updates stays there."""
        stay = max(self.layers(kind, name, Tier.GPU) for name in {tensor, "optimizer"})
        return max(0.0, self.stage.count(kind) - stay)

    def policies(self, kind: LayerKind) -> tuple[tuple[Recompute, Tier], ...]:
        """The ways left in which layers of the kind may keep activations."""
        left = tuple(self.stage.policies(kind))
        if not self.sums or not kind.stores_activations:
            return left
        names = {way: frozenset(self.stage.policy(kind, *way).terms) for way in left}
        every = frozenset[str]().union(*names.values())
        for pinned, amount in self.sums.items():
            if pinned <= every and amount <= 0:
                left = tuple(way for way in left if not names[way] <= pinned)
            elif pinned <= every and amount >= self.stage.count(kind):
                left = tuple(way for way in left if names[way] <= pinned)
        return left

    def possible(self, costs: Costs) -> bool:
        """Whether host memory and drives have room for the tensors that are pinned there."""
        ways = all(self.policies(kind) for kind, _ in self.stage.kinds)
        room = {tier: costs.capacity[tier] / costs.sharing.ranks for tier in AWAY}
        return ways and not self.contradicted and all(self._bytes(t) <= room[t] for t in AWAY)

    def _bytes(self, tier: Tier) -> float:
        stage, state = self.stage, self.stage.graph.sizes.state
        return sum(
            self.layers(k, "parameters", tier) * weight_bytes(stage, k)
            + self.layers(k, "gradients", tier) * gradient_bytes(stage, k)
            + self.layers(k, "optimizer", tier) * owned(stage, k) * state
            for k, _ in stage.kinds
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """Activations of a kind's layers, and the ways left to keep them."""

    kind: LayerKind
    entries: int  # micro-batches, of all layers
    recomputes: tuple[Recompute, ...]  # least first
    leaves: bool  # whether they may be elsewhere than on the GPU

    @classmethod
    def of(cls, pinned: Pinned, kind: LayerKind) -> Kept:
        """A kind's activations, as known without a solver; `pinned` leaves at least one way."""
        policies = pinned.policies(kind)
        left = {recompute for recompute, _ in policies}
        return cls(
            kind=kind,
            entries=sum(pinned.stage.entries(kind)),
            recomputes=tuple(recompute for recompute in Recompute if recompute in left),
            leaves=any(tier is not Tier.GPU for _, tier in policies),
        )

    @property
    def nbytes(self) -> int:
        """Bytes with as little recomputed as may be."""
        return self.entries * self.kind.kept(self.recomputes[0])

    @property
    def least(self) -> int:
        """Bytes that stay on the GPU however much leaves or is recomputed."""
        if self.leaves:
            return 0
        return self.entries * min(self.kind.kept(recompute) for recompute in self.recomputes)

    @property
    def workspace(self) -> int:
        """Bytes that every plan needs to work on a layer."""
        always = (Recompute.NONE, *(self.recomputes if len(self.recomputes) == 1 else ()))
        return max(self.kind.workspace(recompute) for recompute in always)
