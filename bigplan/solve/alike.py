"""Alike pipeline stages: what the graph says of them, before any decision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigplan.graph.graph import Graph, LayerKind
from bigplan.lower.rings import shared_kinds
from bigplan.placement import Rings

ROOMY = Rings()
LEAN = Rings(slots=2, sums=1, shared_ends=True)


@dataclass(frozen=True, slots=True)
class AlikeStages:
    """`stages` of them, with `counts` layers of each kind."""

    name: str
    graph: Graph
    stages: range
    counts: tuple[tuple[str, int], ...]
    # Those of its first chunk in order, neighbours alike together: all, without virtual stages.
    opening: tuple[tuple[str, int], ...]
    most: Rings = ROOMY  # what time rows may count on
    least: Rings = ROOMY  # what memory rows must hold; less than `most` only for a bound

    @property
    def kinds(self) -> Iterator[tuple[LayerKind, int]]:
        """Kinds with their number of layers."""
        return ((self.graph.kinds[name], count) for name, count in self.counts)

    @property
    def end_kinds(self) -> tuple[str, str]:
        """The kinds of its first and of its last layer."""
        return self.opening[0][0], self.graph.layers[-1] if self.last else self.opening[-1][0]

    @property
    def last(self) -> bool:
        """Whether it ends the pipeline."""
        return self.stages[-1] == self.graph.strategy.pp - 1

    @property
    def interleaved(self) -> bool:
        """Whether its stages have several chunks of layers."""
        return self.graph.strategy.vpp > 1

    @property
    def held(self) -> int:
        """Micro-batches whose activations a layer of the fullest stage's first chunk holds."""
        units = self.graph.in_flight_units(self.stages[0])
        return units * self.graph.strategy.accumulation_group

    def entries(self, kind: LayerKind) -> list[int]:
        """Micro-batches that each layer of the kind holds when the fullest stage holds the most."""
        if self.is_loss(kind):
            return [1] * self.count(kind)
        if not self.interleaved:
            return [self.held] * self.count(kind)
        graph, stage = self.graph, self.stages[0]
        return [
            graph.live_units(stage, turn)
            for turn, chunk in enumerate(graph.stage_chunks(stage))
            for layer in graph.chunk_layers(chunk)
            if graph.layers[layer] == kind.name
        ]

    def count(self, kind: LayerKind) -> int:
        """Layers of the kind."""
        return next(count for name, count in self.counts if name == kind.name)

    def is_loss(self, kind: LayerKind) -> bool:
        """Whether the kind is the last layer, whose backward follows its forward at once."""
        return self.last and kind.name == self.graph.layers[-1]

    @property
    def adapters(self) -> int:
        """Elements of all its layers' adapters."""
        return sum(count * sum(t.elements for t in kind.adapters) for kind, count in self.kinds)

    def sharded(self, kind: LayerKind, from_zero: int) -> int:
        """Ranks a tensor kind is split over by ZeRO from stage `from_zero` on."""
        strategy = self.graph.strategy
        whole = kind.pinned and from_zero > 1
        return strategy.zero_ranks if strategy.zero >= from_zero and not whole else 1

    def ring(self, count: int) -> int:
        """GPU slots of a kind with `count` layers, at most."""
        return min(self.most.slots, count)

    def shares(self, kind: LayerKind) -> bool:
        """Whether the kind's slot and sum are another kind's too."""
        return self.least.shared_ends and kind.name in shared_kinds(self.graph)

    def resident(self, kind: LayerKind, tensor: str) -> bool:
        """Whether the tensors cannot leave the GPU.

        They stay if another layer reads them, if chunks visit in turn, or if ZeRO does not shard
        them: off the GPU, ranks of a node never hold the same tensor twice.
        """
        zero = self.graph.strategy.zero
        if (tensor == "parameters" and zero in (1, 2)) or (tensor == "gradients" and zero == 1):
            return True
        return (kind.pinned or self.interleaved) and tensor != "optimizer"
