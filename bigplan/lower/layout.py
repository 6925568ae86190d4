"""One stage's layers with their placement, and who uses which ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

from bigplan.graph.graph import Adapters, Graph, LayerKind
from bigplan.layer_placement import LayerPlacement, pieces, stage_table
from bigplan.lower.entries import streamed_chunk_bytes
from bigplan.lower.position import Position
from bigplan.lower.rings import StageRings
from bigplan.placement import IN_CHUNKS, Placement, Rings, Share, Tier


@dataclass(frozen=True, slots=True)
class StageLayout:
    """One stage's layers with their placement, and the sizes derived from them."""

    graph: Graph
    position: Position
    table: dict[int, LayerPlacement]
    rings: StageRings
    chunk: int  # bytes of NVMe optimizer state updated at a time, see Placement
    captured: bool  # see Placement
    adapters: Adapters  # those of its layers
    rows: frozenset[int] = field(init=False)  # layers of which only rows leave host memory
    visiting: list[int] = field(init=False)  # layers whose parameters pass through a GPU slot
    turns: dict[str, dict[int, int]] = field(init=False)  # by ring: a layer's place among its users
    users: Counter[tuple[str, str]] = field(init=False)  # layers that use a ring of activations
    # By ring of activations: the layer that does not leave it.
    staying: dict[str, int] = field(init=False)
    pieces: dict[tuple[int, Share], int] = field(init=False)  # elements
    # First chunk of a layer's share, counted over the layers before.
    first_chunks: dict[tuple[int, Share], int] = field(init=False)

    def __post_init__(self) -> None:
        rows = (
            layer for layer, at in self.table.items() if at.looks_up and self.kind(layer).looked_up
        )
        object.__setattr__(self, "rows", frozenset(rows))
        object.__setattr__(self, "pieces", self._pieces())
        object.__setattr__(self, "first_chunks", self._first_chunks())
        visiting = [layer for layer in self.table if self.visits(layer)]
        object.__setattr__(self, "visiting", visiting)
        users = {
            "slot": self.visits,
            "sum": self.sums_apart,
            "stage.w": self.stages_weights,
            "stage.g": self.stages_gradients,
        }
        turns = {
            ring: self._turns(uses, self.graph.layers.__getitem__) for ring, uses in users.items()
        }
        turns["act"] = self._turns(lambda i: self.table[i].activations is not Tier.GPU, self.keeps)
        turns["stage.a"] = self._turns(lambda i: self.table[i].activations is Tier.NVME, self.keeps)
        object.__setattr__(self, "turns", turns)
        each = ((ring, self.keeps(i)) for ring in ("act", "stage.a") for i in turns[ring])
        object.__setattr__(self, "users", Counter(each))
        object.__setattr__(self, "staying", self._staying())

    def _pieces(self) -> dict[tuple[int, Share], int]:
        elements: dict[tuple[object, ...], dict[Share, int]] = {}
        found = {}
        for (layer, at), share in product(self.table.items(), Share):
            alike = (self.graph.layers[layer], *at.rows.items())
            if alike not in elements:
                cut = pieces(self.kind(layer), at, self.ranks(layer, from_zero=1))
                elements[alike] = {share: len(part) for share, part in cut.items()}
            found[layer, share] = elements[alike][share]
        return found

    def _first_chunks(self) -> dict[tuple[int, Share], int]:
        """First chunk's number by layer: entries of a ring follow each other over all layers."""
        passed: Counter[Share] = Counter()
        first = {}
        for layer, share in product(self.table, IN_CHUNKS):
            first[layer, share] = passed[share]
            passed[share] += self.chunks(layer, share)
        return first

    def chunks(self, layer: int, share: Share) -> int:
        """Chunks in which the layer's state in the share passes through the GPU or host memory."""
        kind, elements = self.kind(layer), self.pieces[layer, share]
        if kind.orthogonalised:  # directions are of whole matrices
            return int(elements > 0)
        size = self.chunk if share is Share.NVME else streamed_chunk_bytes(self.chunk)
        return -(-self.graph.state_bytes(kind, elements) // size)

    def keeps(self, layer: int) -> str:
        """Name of what the layer keeps of a micro-batch; layers of one name share rings."""
        return f"{self.graph.layers[layer]}.{self.table[layer].recompute}"

    def _turns(self, uses: Callable[[int], bool], alike: Callable[[int], str]) -> dict[int, int]:
        """Position of every layer that uses a ring among the layers like it that do."""
        seen: Counter[str] = Counter()
        turns = {}
        for layer in filter(uses, self.table):
            name = alike(layer)
            turns[layer] = seen[name]
            seen[name] += 1
        return turns

    @classmethod
    def of(cls, graph: Graph, placement: Placement, stage: int) -> StageLayout:
        """The layout of `stage`."""
        table = stage_table(graph, placement, stage)
        counts = Counter(graph.layers[layer] for layer in table)
        at, rings = Position.of(graph, stage), StageRings(graph, Rings.of(placement), counts)
        adapters = graph.adapters(table)
        return cls(graph, at, table, rings, placement.chunk, placement.captured, adapters)

    def kind(self, layer: int) -> LayerKind:
        """The layer's kind."""
        return self.graph.kinds[self.graph.layers[layer]]

    def looked_up(self, layer: int) -> bool:
        """Whether the layer's tables and gradients stay in host memory, and only rows move."""
        return layer in self.rows

    def visits(self, layer: int) -> bool:
        """Whether the layer's parameters pass through a GPU slot."""
        if self.looked_up(layer):
            return False
        return self.table[layer].visits or self.shards(layer, from_zero=3)

    def sums_apart(self, layer: int) -> bool:
        """Whether gradients are summed in a ring entry before they go home."""
        if self.looked_up(layer) or self.kind(layer).frozen:
            return False
        return self.table[layer].gradients is not Tier.GPU or self.shards(layer, from_zero=2)

    def kept_in_gradients(self, layer: int) -> bool:
        """Whether the layer's activations lie at the same place as its gradients.

        With one unit a step, gradients are used up before the layer's forward, which waits for the
        update. New gradients come after its backward.
        """
        at = self.table[layer]
        alike = at.activations is at.gradients is Tier.HOST
        return alike and self.graph.units == 1 and self.kind(layer).stores_activations

    def _staying(self) -> dict[str, int]:
        """By ring, the layer whose activations stay in it: the last one, which is needed first.

        A layer stays only if the ring holds all micro-batches of its unit. Rings that lead to NVMe
        are left out, because their saves wait for room in host memory. Layers with other units'
        micro-batches in between are left out, too.
        """
        group = self.graph.strategy.accumulation_group
        if self.rings.slots < group:
            return {}
        last = {self.keeps(layer): layer for layer in self.turns["act"]}
        return {
            ring: layer
            for ring, layer in last.items()
            if not self.users["stage.a", ring] and self.position.held(layer) == group
        }

    def stays(self, layer: int) -> bool:
        """Whether the layer's activations stay in the ring that they would leave through."""
        return layer in self.staying.values()

    def _updated_elsewhere(self, layer: int) -> bool:
        """Whether some rows have their state off the GPU, and the CPU may update them."""
        if self.kind(layer).orthogonalised:
            return False
        return any(self.pieces[layer, share] for share in Share if share is not Share.GPU)

    def stages_weights(self, layer: int) -> bool:
        """Whether the layer's parameters pass through host staging."""
        at = self.table[layer].parameters
        return at is Tier.NVME or (at is Tier.GPU and self._updated_elsewhere(layer))

    def stages_gradients(self, layer: int) -> bool:
        """Whether the layer's gradients pass through host staging."""
        at = self.table[layer].gradients
        if at is Tier.HOST:
            return self.graph.units > 1 and not self.looked_up(layer)
        return at is Tier.NVME or self._updated_elsewhere(layer)

    def shards(self, layer: int, *, from_zero: int) -> bool:
        """Whether ZeRO splits a tensor kind, from stage `from_zero` on, over a zero group's ranks.

        Tensors that another layer reads too stay whole; only their optimizer state is split.
        """
        if self.graph.strategy.zero < from_zero:
            return False
        return from_zero == 1 or not self.kind(layer).pinned

    def ranks(self, layer: int, *, from_zero: int) -> int:
        """Ranks that share the layer where ZeRO shards from that stage on."""
        return self.graph.strategy.zero_ranks if self.shards(layer, from_zero=from_zero) else 1

    def owned(self, layer: int) -> int:
        """Elements of the layer that this rank updates."""
        return self.kind(layer).owned(self.ranks(layer, from_zero=1))

    def whole(self, layer: int) -> int:
        """Elements of the layer over all ranks, with the padding of the last part."""
        return self.kind(layer).padded(self.ranks(layer, from_zero=1))

    def exchanged(self, layer: int) -> int:
        """Those that ranks gather and sum together: no experts that one rank alone has."""
        alone = self.graph.strategy.expert_shards() == 1
        return self.whole(layer) - (self.kind(layer).whole_experts if alone else 0)
