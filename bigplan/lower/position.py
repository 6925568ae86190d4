"""Where a stage stands in the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bigplan.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class Position:
    """A stage's chunks of layers, and whether other stages come before and after them."""

    graph: Graph
    stage: int
    chunks: tuple[range, ...]  # of layers, in the order of its turns
    starts: frozenset[int]  # first layers of chunks that follow another stage's chunk
    ends: frozenset[int]  # last layers of chunks that another stage's chunk follows

    @classmethod
    def of(cls, graph: Graph, stage: int) -> Position:
        """The position of `stage`."""
        chunks = tuple(graph.chunk_layers(chunk) for chunk in graph.stage_chunks(stage))
        last = len(graph.layers) - 1
        starts = frozenset(chunk[0] for chunk in chunks) - {0}
        return cls(graph, stage, chunks, starts, frozenset(chunk[-1] for chunk in chunks) - {last})

    @property
    def loss(self) -> int:
        """The model's last layer, whose backward follows its forward at once."""
        return len(self.graph.layers) - 1

    @property
    def lends(self) -> bool:
        """Whether this stage has the first layer and the last stage reads its tensors."""
        return self.graph.lends_table and self.stage == 0

    @property
    def borrows(self) -> bool:
        """Whether this stage is the last one and reads the first layer's tensors."""
        return self.graph.lends_table and self.stage == self.graph.strategy.pp - 1

    @property
    def takes_batch(self) -> int | None:
        """The stage's layer that needs a batch first: the model's first layer, else the loss."""
        return next((i for i in (0, self.loss) if any(i in chunk for chunk in self.chunks)), None)

    def held(self, layer: int) -> int:
        """Micro-batches whose activations the layer holds at once."""
        return self._micro_batches(layer, self.graph.in_flight_units)

    def live(self, layer: int) -> int:
        """Micro-batches that the layer holds when its stage holds the most."""
        return self._micro_batches(layer, self.graph.live_units)

    def _micro_batches(self, layer: int, units: Callable[[int, int], int]) -> int:
        """`units`: of a stage and a turn."""
        if layer == self.loss:
            return 1
        turn = next(turn for turn, chunk in enumerate(self.chunks) if layer in chunk)
        return units(self.stage, turn) * self.graph.strategy.accumulation_group

    @property
    def gradient_ring(self) -> str:
        """Ring of hidden-state gradients: forward and backward share one without a pipeline."""
        return "h" if self.graph.strategy.pp == 1 else "d"
