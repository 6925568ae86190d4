"""How many tokens the loss layer takes at a time: the most that the GPU has room for.

A smaller chunk needs less workspace and more time, because every chunk adds its gradient of the
whole table to the sum (8,192 tokens of 4,096 x 128,256 on an H200: 53.0 ms by 256, 37.7 by 2,048,
35.1 by 4,096). The integer program does not decide the chunk. It sees the time of the largest chunk
and the workspace of the smallest, so its rows stay bounds of every plan. A placement then takes the
largest chunk whose workspace fits into the GPU's free memory, or into its blocks' workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bigplan.cost import Costs, price
from bigplan.graph.build import graph_of_shape, loss_chunks, loss_layer
from bigplan.graph.graph import Graph, LayerKind
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.program import Program
from bigplan.solve.pins import LOSS_CHUNK, Pin
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.verify import rank_bytes


@dataclass(frozen=True, slots=True)
class LossLayer:
    """The last layer of strategies that compute the same, priced once for every chunk."""

    model: ModelSpec
    training: Training
    nodes: NodeGroup
    strategy: Strategy
    chunks: tuple[int, ...]  # tokens, to choose from, fewest first
    _kinds: dict[int, LayerKind] = field(default_factory=dict, compare=False, repr=False)
    _costs: dict[int, Costs] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        training: Training,
        nodes: NodeGroup,
        strategy: Strategy,
        pins: tuple[Pin, ...] = (),
    ) -> LossLayer:
        """With all chunks, or the one that the user set."""
        chunks = loss_chunks(model, training, strategy)
        for pin in pins:
            if pin.tensor == LOSS_CHUNK:
                chunks = (min(int(pin.amount or 1), chunks[-1]),)
        return cls(model, training, nodes, strategy, chunks)

    def relaxed_graph(self) -> Graph:
        """The strategy's graph with the fastest loss layer and the least workspace."""
        gpu, chunk = self.nodes.gpu, self.chunks[-1]
        shape = RankShape.on(gpu, self.model, self.training, self.strategy)
        graph = graph_of_shape(shape, chunk)
        fastest, least = graph.kinds[graph.layers[-1]], self.kind(self.chunks[0])
        workspace, largest = least.backward_workspace, least.largest
        return _with_last(graph, replace(fastest, backward_workspace=workspace, largest=largest))

    def kind(self, chunk: int) -> LayerKind:
        """The layer as it takes so many tokens at a time."""
        if chunk not in self._kinds:
            fused = self.nodes.gpu.runs_kernels
            made = loss_layer(self.model, self.training, self.strategy, chunk, fused)
            self._kinds[chunk] = made
        return self._kinds[chunk]

    def fitting(self, programs: Sequence[Program], capacity: int, reserve: int) -> int:
        """The largest chunk that the GPUs have room for beside the stages' programs.

        The last stage's workspace is that of the smallest chunk or of another layer. Logits lie in
        one piece: where it exceeds the allocator's `reserve`, all of them keep more free.
        """
        *_, free = left = [capacity - rank_bytes([program], Tier.GPU) for program in programs]
        workspace = programs[-1].buffers["workspace"].nbytes
        for chunk in reversed(self.chunks[1:]):
            kind = self.kind(chunk)
            kept = max(0, kind.largest - reserve)
            if kept <= min(left) and kept + max(0, kind.backward_workspace - workspace) <= free:
                return chunk
        return self.chunks[0]

    def settled(self, graph: Graph, costs: Costs, chunk: int) -> tuple[Graph, Costs]:
        """Graph and prices of a strategy that computes the same, its loss taken by `chunk`."""
        kind, name = self.kind(chunk), graph.layers[-1]
        tokens = self.strategy.rank_tokens(self.training)
        exact = replace(_with_last(graph, kind), loss_chunk=min(chunk, tokens))
        if chunk not in self._costs:
            alike = replace(idle(exact), strategy=self.strategy)
            busy = replace(alike, kinds={**alike.kinds, name: kind})
            self._costs[chunk] = price(busy, self.training, self.nodes)
        found, before = self._costs[chunk], costs.kinds[name]
        cost = found.kinds[name].exchanging(before)
        # More logits at once want more of the GPU kept free for the allocator. The rest is the
        # strategy's own: one with more stages has more communicators.
        reserve = max(costs.reserve, kind.largest)
        room = max(0, costs.capacity[Tier.GPU] + costs.reserve - reserve)
        kinds, capacity = {**costs.kinds, name: cost}, {**costs.capacity, Tier.GPU: room}
        return exact, replace(costs, kinds=kinds, capacity=capacity, reserve=reserve)


def idle(graph: Graph) -> Graph:
    """The graph with layers of the same sizes that compute nothing."""
    return replace(graph, kinds={name: _idle(kind) for name, kind in graph.kinds.items()})


def _idle(kind: LayerKind) -> LayerKind:
    reruns = {recompute: way._replace(operators=()) for recompute, way in kind.reruns.items()}
    return replace(kind, forward=(), backward=(), reruns=reruns)


def _with_last(graph: Graph, kind: LayerKind) -> Graph:
    return replace(graph, kinds={**graph.kinds, graph.layers[-1]: kind})
