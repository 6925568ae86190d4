"""A class of stages with its prices: compute, bytes moved and gradients, as linear expressions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from bigplan.cost import Costs
from bigplan.graph.graph import LayerKind
from bigplan.lower.entries import looked_up_bytes
from bigplan.placement import Tier
from bigplan.solve.linear import Linear, total
from bigplan.solve.memory import gradient_bytes, ring_bytes, weight_bytes
from bigplan.solve.stage import AWAY, RERUN, StageClass

NOTHING = Linear()
Kinds = list[tuple[LayerKind, int]]  # with their number of layers


@dataclass(frozen=True)
class StageTimes:
    """A class of stages with its prices, as linear expressions in its decisions."""

    stage: StageClass
    costs: Costs

    @property
    def group(self) -> int:
        """Micro-batches per unit."""
        return self.stage.graph.strategy.accumulation_group

    @property
    def units(self) -> int:
        """Units per step."""
        return self.stage.graph.units

    @cached_property
    def inner(self) -> Kinds:
        """Kinds whose backward is in the backward pass: all but the loss."""
        return [(k, n) for k, n in self.stage.kinds if not self.stage.is_loss(k)]

    @cached_property
    def again(self) -> Kinds:
        """Kinds whose parameters the backward pass needs, too."""
        return [(k, n) for k, n in self.inner if not k.idle_backward]

    def reduce(self, kind: LayerKind) -> float:
        """Seconds of reducing a layer's gradients."""
        none = kind.frozen or self.stage.graph.strategy.shards == 1
        return 0.0 if none else self.costs.kinds[kind.name].reduce

    def final_reduce(self, kind: LayerKind) -> float:
        """Seconds of a layer's last reduction in a step, over zero groups too."""
        return self.reduce(kind) + self.sum_replicas(kind)

    def sum_replicas(self, kind: LayerKind) -> float:
        """Seconds of summing a rank's part of a layer's gradients over zero groups."""
        several = self.stage.graph.strategy.zero_group and not kind.frozen
        return self.costs.kinds[kind.name].sum_replicas if several else 0.0

    @cached_property
    def forward_compute(self) -> float:
        """Seconds of a unit's forward pass, the last layer's backward included."""
        prices = self.costs.kinds
        return self.group * sum(
            n * prices[k.name].forward + (prices[k.name].backward if self.stage.is_loss(k) else 0)
            for k, n in self.stage.kinds
        )

    @cached_property
    def last_forward(self) -> float:
        """Seconds of the last layer in that, its backward included where it is the loss."""
        kind = self.stage.graph.kinds[self.stage.end_kinds[-1]]
        cost = self.costs.kinds[kind.name]
        return self.group * (cost.forward + (cost.backward if self.stage.is_loss(kind) else 0.0))

    @cached_property
    def plain_backward(self) -> float:
        """Seconds of a unit's backward pass without recomputation."""
        prices = self.costs.kinds
        return self.group * sum(n * prices[k.name].backward for k, n in self.inner)

    @cached_property
    def backward_compute(self) -> Linear:
        """Seconds of a unit's backward pass, recomputation included."""
        prices = self.costs.kinds
        again = [
            prices[k.name].again(recompute) * self.stage.keeping(k, recompute)
            for k, _ in self.inner
            for recompute in RERUN
        ]
        return self.plain_backward + self.group * total(again)

    def forward_hop(self) -> float:
        """Seconds until the unit's first micro-batch leaves the stage."""
        last = self.stage.end_kinds[-1]
        return self.forward_compute - (self.group - 1) * self.costs.kinds[last].forward

    def other_micro_batches(self, kind: str) -> float:
        """Seconds of a kind's backward on a unit's micro-batches but one, at most."""
        cost = self.costs.kinds[kind]
        again = max(cost.again(recompute) for recompute in self.stage.graph.recomputes)
        return (self.group - 1) * (cost.backward + again)

    # Bytes of one pass by lane, and the part of them that may be in slots when the pass starts.

    def loads(self, kinds: Kinds) -> tuple[Linear, Linear]:
        """Parameters to the GPU."""
        moved = [(k, n, self.stage.passing(k, "parameters"), "slots") for k, n in kinds]
        return self._moved(moved, 0)

    @cached_property
    def rows(self) -> Linear:
        """Rows that are looked up in host memory, to the GPU."""
        kinds = [k for k, _ in self.stage.kinds if k.looked_up]
        nbytes = self.group * looked_up_bytes(self.stage.graph)
        return total([nbytes * self.stage.looked_up(k) for k in kinds])

    @property
    def row_gradients(self) -> Linear:
        """Their gradients, back."""
        return NOTHING if self.stage.graph.frozen else self.rows

    def weight_reads(self, kinds: Kinds, *, staged: int = 0) -> tuple[Linear, Linear]:
        """Parameters from NVMe; `staged` of them wait in host staging before the pass starts."""
        on_disk = self.stage.tensor
        moved = [(k, n, on_disk(k, "parameters", Tier.NVME), "staged_weights") for k, n in kinds]
        return self._moved(moved, staged)

    def _moved(
        self, moved: list[tuple[LayerKind, int, Linear, str]], staged: int
    ) -> tuple[Linear, Linear]:
        """Bytes of all layers, and the most of them that slots and staging can hold."""
        every, held = [], []
        for kind, count, layers, switch in moved:
            nbytes = weight_bytes(self.stage, kind)
            ahead = self.stage.ring(count) + staged
            every.append(nbytes * layers)
            few = ahead >= count  # then they can hold every layer that moves
            held.append(nbytes * (layers if few else ahead * self.stage.switch(kind, switch)))
        return total(every), total(held)

    @cached_property
    def saves(self) -> Linear:
        """Activations off the GPU, or back."""
        return self._activations(AWAY)

    @cached_property
    def moved(self) -> Linear:
        """`saves` less what stays in rings: a layer of each policy without activations on NVMe."""
        stay = [
            self.group
            * k.kept(recompute)
            * (
                self.stage.switch(k, f"passing.{recompute}")
                - self.stage.switch(k, f"on_disk.{recompute}")
            )
            for k, _ in self.inner
            for recompute in self.stage.graph.recomputes
            if self.stage.stays(k, recompute).terms
        ]
        return self.saves - total(stay)

    @cached_property
    def disk_saves(self) -> Linear:
        """Activations to NVMe, or back."""
        return self._activations((Tier.NVME,))

    def _activations(self, tiers: tuple[Tier, ...]) -> Linear:
        return total(
            [
                self.group * k.kept(recompute) * self.stage.policy(k, recompute, tier)
                for k, _ in self.inner
                for recompute in self.stage.graph.recomputes
                for tier in tiers
            ]
        )

    def entries(self, ring: str, count: int) -> Linear:
        """Bytes of `count` entries of every ring of activations."""
        return count * total([ring_bytes(self.stage, k, ring) for k, _ in self.inner])

    def gradients(self, tiers: tuple[Tier, ...], *, inner: bool = False) -> Linear:
        """Gradient bytes that a unit moves to their home on `tiers`, but for rows of tables."""
        kinds = [(k, n) for k, n in (self.inner if inner else self.stage.kinds) if not k.frozen]
        return total(
            [
                gradient_bytes(self.stage, k)
                * (
                    total([self.stage.tensor(k, "gradients", tier) for tier in tiers])
                    - (self.stage.looked_up(k) if Tier.HOST in tiers else NOTHING)
                )
                for k, _ in kinds
            ]
        )
