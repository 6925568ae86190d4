"""The rings of slots and sums through which one stage's layers pass on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigplan.graph.graph import Graph
from bigplan.placement import Rings


def shared_kinds(graph: Graph) -> tuple[str, ...]:
    """Kinds that may share a slot and a sum: the first and the last layer's, used in turn."""
    ends = graph.layers[0], graph.layers[-1]
    alone = all(graph.layers.count(name) == 1 for name in ends)
    return ends if graph.strategy.pp == 1 and alone else ()


@dataclass(frozen=True, slots=True)
class StageRings:
    """The rings of a stage by kind of layer: none is longer than the stage has layers of it."""

    graph: Graph
    most: Rings
    counts: Mapping[str, int]  # layers of each kind

    @property
    def slots(self) -> int:
        """Entries of a ring for parameters or activations."""
        return self.most.slots

    def slots_of(self, name: str) -> int:
        """Slots for a kind."""
        return min(self.most.slots, self.counts[name])

    def sums_of(self, name: str) -> int:
        """Gradient sums for a kind whose gradients leave."""
        return min(self.most.sums, self.counts[name])

    def shared(self, name: str) -> str:
        """Name of the kind's slots and sums: the model's first and last layer may share theirs."""
        return "ends" if self.most.shared_ends and name in shared_kinds(self.graph) else name
