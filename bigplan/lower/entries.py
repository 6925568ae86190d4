"""How large the entries of rings and staging are, and how many: the same for every placement.

The solver counts with these sizes before there is a layout; `lower.buffers` makes the buffers.
"""

from __future__ import annotations

from math import ceil

from bigplan.graph.graph import Graph, LayerKind
from bigplan.graph.operators import Attention, Gemm
from bigplan.mechanics import (
    ALIGNMENT,
    CHECKPOINT_STAGING,
    MOST_STREAMING,
    MUON_STREAMING,
    OPERATIONS_A_BYTE,
    PAGE,
    STREAMED_CHUNKS,
    STREAMING,
)
from bigplan.placement import CHUNK


def checkpoint_staging(graph: Graph) -> int:
    """Bytes of a checkpoint's staging entry, in whole pages and no more than a layer fills."""
    sizes = graph.sizes
    most = max(kind.parameters for kind in graph.kinds.values())
    state = max(graph.state_bytes(kind, kind.parameters) for kind in graph.kinds.values())
    if graph.frozen:  # a stage's adapters are one piece, and stages may differ in blocks
        stages = map(graph.stage_layers, range(graph.strategy.pp))
        most = max(graph.adapters(layers).elements for layers in stages)
        state = sizes.state_bytes(most)
    largest = max(state, 0 if sizes.master else most * sizes.parameter)
    return min(CHECKPOINT_STAGING, -(-largest // PAGE) * PAGE)


def staged_chunk_bytes(graph: Graph, chunk: int = CHUNK) -> int:
    """Bytes reserved per staged chunk of NVMe optimizer state, whole pages.

    A chunk is whole units, so it may exceed the wanted size by one unit; it may cut a block in two.
    """
    more = graph.sizes.state_bytes(largest_unit(graph)) + graph.sizes.scales
    return -(-(chunk + more) // PAGE) * PAGE


def streaming_bytes(graph: Graph, chunk: int = CHUNK) -> int:
    """Bytes of an entry that a chunk of state passes through, with its gradients and parameters.

    Each of the three begins at a multiple of ALIGNMENT. No entry is larger than a layer. What a
    rank owns of a layer that Muon updates is one chunk.
    """
    sizes, most = graph.sizes, max(kind.parameters for kind in graph.kinds.values())
    each = max(1, sizes.state + sizes.second)
    elements = min(most, streamed_chunk_bytes(chunk) // each + largest_unit(graph) + 1)
    state = sizes.state_bytes(elements) + elements * sizes.second
    ranks = graph.strategy.zero_ranks
    whole = [
        (kind.owned(ranks), graph.state_bytes(kind, kind.owned(ranks)))
        for kind in graph.kinds.values()
        if kind.orthogonalised
    ]
    return max(_entry_bytes(graph, *chunk) for chunk in ((elements, state), *whole))


def _entry_bytes(graph: Graph, elements: int, state: int) -> int:
    others = (elements * size for size in (graph.sizes.gradient, graph.sizes.parameter))
    return sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in (state, *others))


def streaming_entries(graph: Graph) -> int:
    """Chunks of state that may be on the GPU at once: those that arrive during the longest kernel.

    Deferred updates run in a forward pass, so that a chunk may wait for a forward's kernel. What
    Muon updates is whole layers, of which few fit.
    """
    if any(kind.orthogonalised for kind in graph.kinds.values()):
        return MUON_STREAMING
    operators = [
        operator
        for kind in graph.kinds.values()
        for operator in (*kind.forward, *(() if graph.deferred else kind.backward))
        if isinstance(operator, Gemm | Attention)
    ]
    each = (op.flops / (op.launches or 1 if isinstance(op, Gemm) else 1) for op in operators)
    longest = max(each, default=0.0)
    arriving = ceil(longest / OPERATIONS_A_BYTE / streaming_bytes(graph))
    return min(MOST_STREAMING, max(STREAMING, 2 + arriving))


def streamed_chunk_bytes(chunk: int) -> int:
    """Bytes of state that pass through the GPU at a time, where those of NVMe are `chunk`."""
    return max(1, chunk // STREAMED_CHUNKS)


def looked_up_bytes(graph: Graph) -> int:
    """Bytes of an entry for tokens and their rows of a layer's tables, or gradients.

    One kind of layer at most has tables that may be looked up so.
    """
    rows = max(kind.looked_up for kind in graph.kinds.values())
    return rows * graph.sizes.parameter + graph.kinds[graph.layers[0]].boundary


def row_bytes(kind: LayerKind) -> int:
    """Approximate bytes that host memory moves to add a micro-batch's rows to their sum.

    An element is widened to fp32 (2 + 4 bytes). It is added to those of equal rows in a buffer that
    was cleared before (4 + 4 + 8). Then it is added to the sum (4 + 8): runtime/layers/lookup.py.
    The result is a multiple of three, because an accumulation takes three times its amount.
    """
    return 34 * kind.looked_up // 3 * 3


def largest_unit(graph: Graph) -> int:
    """Elements by which a chunk may exceed an equal part, because a chunk is whole units."""
    return max(kind.unit for kind in graph.kinds.values())


def data_staging(graph: Graph) -> tuple[int, int]:
    """Bytes of a micro-batch's tokens and targets, and how many micro-batches host memory holds.

    The first layer takes a whole accumulation group before the loss layer lets go of any.
    """
    nbytes = 2 * graph.kinds[graph.layers[0]].boundary
    return nbytes, graph.strategy.accumulation_group * (1 if graph.strategy.pp == 1 else 2)
