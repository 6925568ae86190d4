"""Bytes and elements of a stage's layers, as its buffers hold them and its actions move them."""

from __future__ import annotations

from bigplan.lower.entries import data_staging
from bigplan.lower.layout import StageLayout
from bigplan.placement import ON_CPU, Share


def parameter_bytes(layout: StageLayout, layer: int) -> int:
    """Bytes of the layer's parameters at home (a shard under ZeRO-3)."""
    sharded = layout.shards(layer, from_zero=3)
    elements = layout.owned(layer) if sharded else layout.whole(layer)
    return elements * layout.graph.sizes.parameter


def full_parameter_bytes(layout: StageLayout, layer: int) -> int:
    """Bytes of the layer's parameters in use."""
    return layout.whole(layer) * layout.graph.sizes.parameter


def owned_parameter_bytes(layout: StageLayout, layer: int) -> int:
    """Bytes of the parameters that this rank updates; only these leave the GPU."""
    return layout.owned(layer) * layout.graph.sizes.parameter


def gradient_bytes(layout: StageLayout, layer: int) -> int:
    """Bytes of the layer's gradients at home (a shard under ZeRO-2 and 3)."""
    sharded = layout.shards(layer, from_zero=2)
    elements = layout.owned(layer) if sharded else layout.whole(layer)
    return elements * layout.graph.sizes.gradient


def owned_gradient_bytes(layout: StageLayout, layer: int) -> int:
    """Bytes of the gradients that this rank's updates use; only these leave the GPU."""
    return layout.owned(layer) * layout.graph.sizes.gradient


def full_gradient_bytes(layout: StageLayout, layer: int) -> int:
    """Bytes of the layer's gradients while they are summed."""
    return layout.whole(layer) * layout.graph.sizes.gradient


def gathered_bytes(layout: StageLayout, layer: int) -> int:
    """Bytes of the layer's parameters that ranks gather."""
    return layout.exchanged(layer) * layout.graph.sizes.parameter


def reduced_bytes(layout: StageLayout, layer: int) -> int:
    """Bytes of the layer's gradients that ranks sum together."""
    return layout.exchanged(layer) * layout.graph.sizes.gradient


def cpu_piece(layout: StageLayout, layer: int) -> int:
    """Elements this rank updates on the CPU."""
    return sum(layout.pieces[layer, share] for share in ON_CPU)


def updaters(layout: StageLayout, layer: int) -> tuple[Share, ...]:
    """Shares whose rows of the layer's parameters are updated separately."""
    return tuple(dict.fromkeys(share.updater for share in Share if layout.pieces[layer, share]))


def chunk_elements(layout: StageLayout, layer: int, share: Share) -> int:
    """Approximate elements of a chunk: rows are not split, so some chunks have a row more."""
    return -(-layout.pieces[layer, share] // layout.chunks(layer, share))


def kept_bytes(layout: StageLayout, layer: int) -> int:
    """Bytes kept per micro-batch between forward and backward, at most."""
    return layout.kind(layer).room(layout.table[layer].recompute)


def batch_bytes(layout: StageLayout) -> int:
    """Bytes of a micro-batch's tokens and targets."""
    return data_staging(layout.graph)[0]


def hidden_bytes(layout: StageLayout) -> int:
    """Bytes of a micro-batch's hidden state between layers, or what a message has with it."""
    return max(layout.kind(layer).boundary for layer in layout.table) + layout.graph.handed
