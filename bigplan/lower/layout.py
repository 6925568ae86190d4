"""One stage's layers with their placement, and who uses which ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

from bigplan.graph.graph import Graph, LayerKind
from bigplan.placement import (
    LayerPlacement,
    Placement,
    Tier,
    piece_elements,
    stage_table,
)

STAGING = 2  # host staging entries: one moves while the other is used
CHUNK_STAGING = 3  # state chunks in host memory: one arrives, one is updated, one leaves
PAGE = 4096  # O_DIRECT moves whole pages


@dataclass(frozen=True, slots=True)
class Layout:
    """One stage's layers with their placement, and the sizes derived from them."""

    graph: Graph
    stage: int
    table: dict[int, LayerPlacement]
    slots: int
    chunk: int  # bytes of NVMe optimizer state updated at a time
    counts: Mapping[str, int]  # layers of each kind
    visiting: list[int] = field(init=False)  # layers whose parameters pass through a GPU slot
    turns: dict[str, dict[int, int]] = field(init=False)  # by ring: a layer's place among its users
    pieces: dict[tuple[int, Tier], int] = field(init=False)  # elements by tier of their state

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", self._pieces())
        visiting = [layer for layer in self.table if self.visits(layer)]
        object.__setattr__(self, "visiting", visiting)
        users = {
            "slot": self.visits,
            "sum": self.sums_apart,
            "act": lambda layer: self.table[layer].activations is not Tier.GPU,
            "stage.a": lambda layer: self.table[layer].activations is Tier.NVME,
            "stage.w": self.stages_weights,
            "stage.g": self.stages_gradients,
        }
        turns = {ring: self._turns(uses) for ring, uses in users.items()}
        object.__setattr__(self, "turns", turns)

    def _pieces(self) -> dict[tuple[int, Tier], int]:
        elements: dict[tuple[object, ...], int] = {}
        pieces = {}
        for (layer, at), tier in product(self.table.items(), Tier):
            alike = (self.graph.layers[layer], tier, *at.optimizer.items())
            if alike not in elements:
                elements[alike] = piece_elements(self.kind(layer), at, tier)
            pieces[layer, tier] = self.owned(layer, elements[alike], from_zero=1)
        return pieces

    def _turns(self, uses: Callable[[int], bool]) -> dict[int, int]:
        """Position of every layer that uses a ring among the layers of its kind that do."""
        seen: Counter[str] = Counter()
        turns = {}
        for layer in filter(uses, self.table):
            name = self.graph.layers[layer]
            turns[layer] = seen[name]
            seen[name] += 1
        return turns

    @classmethod
    def of(cls, graph: Graph, placement: Placement, stage: int) -> Layout:
        """The layout of `stage`."""
        table = stage_table(graph, placement, stage)
        counts = Counter(graph.layers[layer] for layer in table)
        return cls(graph, stage, table, placement.slots, placement.chunk, counts)

    def kind(self, layer: int) -> LayerKind:
        """The layer's kind."""
        return self.graph.kinds[self.graph.layers[layer]]

    def visits(self, layer: int) -> bool:
        """Whether the layer's parameters pass through a GPU slot."""
        return self.table[layer].streamed or self.shards(layer, from_zero=3)

    def sums_apart(self, layer: int) -> bool:
        """Whether gradients are summed in a ring entry before they go home."""
        return self.table[layer].gradients is not Tier.GPU or self.shards(layer, from_zero=2)

    def _on_cpu(self, layer: int) -> bool:
        return any(self.pieces[layer, tier] for tier in (Tier.HOST, Tier.NVME))

    def stages_weights(self, layer: int) -> bool:
        """Whether the layer's parameters pass through host staging."""
        at = self.table[layer].parameters
        return at is Tier.NVME or (at is Tier.GPU and self._on_cpu(layer))

    def stages_gradients(self, layer: int) -> bool:
        """Whether the layer's gradients pass through host staging."""
        at = self.table[layer].gradients
        if at is Tier.HOST:
            return self.graph.units > 1
        return at is Tier.NVME or self._on_cpu(layer)

    def ring(self, name: str) -> int:
        """Slots for a kind: no more than the stage has layers of it."""
        return min(self.slots, self.counts[name])

    def shards(self, layer: int, *, from_zero: int) -> bool:
        """Whether ZeRO splits this tensor kind of the layer over the data-parallel ranks.

        Tensors that another layer reads too stay whole; only their optimizer state is split.
        """
        whole = self.kind(layer).pinned and from_zero > 1
        return self.graph.strategy.zero >= from_zero and not whole

    def owned(self, layer: int, elements: int, *, from_zero: int) -> int:
        """Elements of the layer that are this rank's where ZeRO shards from that stage on."""
        split = self.graph.strategy.dp if self.shards(layer, from_zero=from_zero) else 1
        return -(-elements // split)

    @property
    def is_first(self) -> bool:
        """Whether the stage starts the pipeline."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage ends the pipeline."""
        return self.stage == self.graph.strategy.pp - 1

    @property
    def gradient_ring(self) -> str:
        """Ring of hidden-state gradients: forward and backward share one without a pipeline."""
        return "h" if self.graph.strategy.pp == 1 else "d"
