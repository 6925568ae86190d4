"""The buffers of one stage: what is allocated on every tier for the whole run.

Buffers, by name (l: layer, k: layer kind):

    w{l} g{l} a{l}         home of parameters, gradients, saved activations (a ring per micro-batch)
    o{l}.gpu .host .nvme   optimizer state of the rows updated from that tier
    slot.{k} shard.{k}     GPU rings that streamed parameters, and ZeRO-3 shards of them, visit
    sum.{k}                GPU ring that gradients with their home elsewhere are summed in
    act.{k}                GPU ring that activations with their home elsewhere pass through
    stage.w.{k} .g .a, stage.o   host rings between the GPU or the CPU and NVMe
    h d                    hidden states and their gradients between layers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
from bigplan.program import Buffer

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
    pieces: dict[tuple[int, Tier], int] = field(init=False)  # see `piece`

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
            pieces[layer, tier] = self._owned(layer, elements[alike], from_zero=1)
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

    def stages_weights(self, layer: int) -> bool:
        """Whether the layer's parameters pass through host staging."""
        at = self.table[layer].parameters
        return at is Tier.NVME or (at is Tier.GPU and bool(self.cpu_piece(layer)))

    def stages_gradients(self, layer: int) -> bool:
        """Whether the layer's gradients pass through host staging."""
        at = self.table[layer].gradients
        if at is Tier.HOST:
            return self.graph.units > 1
        return at is Tier.NVME or bool(self.cpu_piece(layer))

    def ring(self, name: str) -> int:
        """Slots for a kind: no more than the stage has layers of it."""
        return min(self.slots, self.counts[name])

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a micro-batch's hidden state between layers."""
        return max(self.kind(layer).boundary for layer in self.table)

    def shards(self, layer: int, *, from_zero: int) -> bool:
        """Whether ZeRO splits this tensor kind of the layer over the data-parallel ranks.

        Tensors that another layer reads too stay whole; only their optimizer state is split.
        """
        whole = self.kind(layer).pinned and from_zero > 1
        return self.graph.strategy.zero >= from_zero and not whole

    def _owned(self, layer: int, elements: int, *, from_zero: int) -> int:
        split = self.graph.strategy.dp if self.shards(layer, from_zero=from_zero) else 1
        return -(-elements // split)

    def parameter_bytes(self, layer: int) -> int:
        """Bytes of the layer's parameters at home (a shard under ZeRO-3)."""
        elements = self._owned(layer, self.kind(layer).parameters, from_zero=3)
        return elements * self.graph.sizes.parameter

    def full_parameter_bytes(self, layer: int) -> int:
        """Bytes of the layer's parameters in use."""
        return self.kind(layer).parameters * self.graph.sizes.parameter

    def gradient_bytes(self, layer: int) -> int:
        """Bytes of the layer's gradients at home (a shard under ZeRO-2 and 3)."""
        elements = self._owned(layer, self.kind(layer).parameters, from_zero=2)
        return elements * self.graph.sizes.gradient

    def full_gradient_bytes(self, layer: int) -> int:
        """Bytes of the layer's gradients while they are summed."""
        return self.kind(layer).parameters * self.graph.sizes.gradient

    def piece(self, layer: int, tier: Tier) -> int:
        """Elements this rank updates from state on `tier`."""
        return self.pieces[layer, tier]

    def cpu_piece(self, layer: int) -> int:
        """Elements this rank updates on the CPU."""
        return self.piece(layer, Tier.HOST) + self.piece(layer, Tier.NVME)

    def chunks(self, layer: int) -> int:
        """Chunks of the layer's NVMe optimizer state."""
        return -(-self.piece(layer, Tier.NVME) * self.graph.sizes.state // self.chunk)

    def kept(self, layer: int) -> int:
        """Bytes kept per micro-batch between forward and backward."""
        return self.kind(layer).kept(self.table[layer].recompute)

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

    def buffers(self) -> dict[str, Buffer]:
        """Every buffer, by name."""
        every = [*_homes(self), *_rings(self), *_hidden(self)]
        return {buffer.name: buffer for buffer in every}


def _homes(layout: Layout) -> Iterator[Buffer]:
    group = layout.graph.strategy.accumulation_group
    held = layout.graph.in_flight_units(layout.stage) * group
    last = len(layout.graph.layers) - 1
    state = layout.graph.sizes.state
    for layer, at in layout.table.items():
        yield Buffer(f"w{layer}", at.parameters, layout.parameter_bytes(layer), "parameters")
        yield Buffer(f"g{layer}", at.gradients, layout.gradient_bytes(layer), "gradients")
        for tier in (Tier.GPU, Tier.HOST):
            nbytes = layout.piece(layer, tier) * state
            if nbytes:
                yield Buffer(f"o{layer}.{tier}", tier, nbytes, "optimizer")
        chunks = layout.chunks(layer)
        if chunks:
            elements = layout.piece(layer, Tier.NVME)
            widest = max(tensor.columns for tensor in layout.kind(layer).tensors)
            share = min(elements, -(-elements // chunks) + widest) * state
            nbytes = -(-share // PAGE) * PAGE
            yield Buffer(f"o{layer}.nvme", Tier.NVME, nbytes, "optimizer", chunks)
        # The last layer's backward follows its forward at once, so one entry is enough.
        entries = 1 if layer == last else held
        yield Buffer(f"a{layer}", at.activations, layout.kept(layer), "activations", entries)


def state_chunk_bytes(layout: Layout) -> int:
    """Bytes reserved per chunk of NVMe optimizer state, whole pages.

    Rows are not split, so a chunk may exceed the wanted size by one row of the widest tensor.
    """
    widest = max(tensor.columns for kind in layout.graph.kinds.values() for tensor in kind.tensors)
    nbytes = layout.chunk + widest * layout.graph.sizes.state
    return -(-nbytes // PAGE) * PAGE


def _rings(layout: Layout) -> Iterator[Buffer]:
    names = dict.fromkeys(layout.graph.layers[layer] for layer in layout.table)
    for name in names:
        layers = [layer for layer in layout.table if layout.graph.layers[layer] == name]
        yield from _weight_rings(layout, name, layers)
        yield from _gradient_rings(layout, name, layers)
        yield from _activation_rings(layout, name, layers)
    if any(layout.chunks(layer) for layer in layout.table):
        yield Buffer("stage.o", Tier.HOST, state_chunk_bytes(layout), "staging", CHUNK_STAGING)


def _weight_rings(layout: Layout, name: str, layers: list[int]) -> Iterator[Buffer]:
    count, table = layout.ring(name), layout.table
    if any(layout.visits(layer) for layer in layers):
        nbytes = layout.full_parameter_bytes(layers[0])
        yield Buffer(f"slot.{name}", Tier.GPU, nbytes, "slots", count)
    if any(table[layer].streamed and layout.shards(layer, from_zero=3) for layer in layers):
        yield Buffer(f"shard.{name}", Tier.GPU, layout.parameter_bytes(layers[0]), "slots", count)
    if any(layout.stages_weights(layer) for layer in layers):
        nbytes = layout.parameter_bytes(layers[0])
        yield Buffer(f"stage.w.{name}", Tier.HOST, nbytes, "staging", STAGING)


def _gradient_rings(layout: Layout, name: str, layers: list[int]) -> Iterator[Buffer]:
    if any(layout.sums_apart(layer) for layer in layers):
        nbytes = layout.full_gradient_bytes(layers[0])
        yield Buffer(f"sum.{name}", Tier.GPU, nbytes, "slots", min(STAGING, len(layers)))
    if any(layout.stages_gradients(layer) for layer in layers):
        nbytes = layout.gradient_bytes(layers[0])
        yield Buffer(f"stage.g.{name}", Tier.HOST, nbytes, "staging", STAGING)


def _activation_rings(layout: Layout, name: str, layers: list[int]) -> Iterator[Buffer]:
    away = [layer for layer in layers if layout.table[layer].activations is not Tier.GPU]
    if away:
        nbytes = max(layout.kept(layer) for layer in away)
        yield Buffer(f"act.{name}", Tier.GPU, nbytes, "slots", layout.slots)
    on_disk = [layer for layer in away if layout.table[layer].activations is Tier.NVME]
    if on_disk:
        nbytes = max(layout.kept(layer) for layer in on_disk)
        yield Buffer(f"stage.a.{name}", Tier.HOST, nbytes, "staging", STAGING)


def _hidden(layout: Layout) -> Iterator[Buffer]:
    strategy = layout.graph.strategy
    nbytes = layout.hidden_bytes
    # A pipeline stage receives the next unit's micro-batches while it works on this one's.
    count = strategy.accumulation_group * (1 if strategy.pp == 1 else 2)
    yield Buffer("h", Tier.GPU, nbytes, "activations", count)
    if strategy.pp > 1:
        yield Buffer("d", Tier.GPU, nbytes, "activations", count)
    workspace = max(
        layout.kind(layer).workspace(at.recompute) for layer, at in layout.table.items()
    )
    yield Buffer("workspace", Tier.GPU, workspace, "workspace")
    for layer in layout.table:
        yield Buffer(f"n{layer}", Tier.HOST, 8, "staging")
    yield Buffer("clip", Tier.HOST, 8, "staging")
