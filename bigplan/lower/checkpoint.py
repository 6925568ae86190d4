"""Checkpoint of one layer: actions that write its optimizer state, and its parameters.

Where the state holds a master copy, parameters are casts of it and are not written. Pieces in host
memory are written from their home; the others pass through the staging ring `stage.c`.
"""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.lower.layout import StageLayout
from bigplan.lower.refs import checkpoint_entry, parameter_home, state_home
from bigplan.lower.sizes import chunk_elements, owned_parameter_bytes
from bigplan.mechanics import STAGING
from bigplan.placement import IN_CHUNKS, Share, Tier
from bigplan.program import Action, Lane, Op, Ref


def checkpoint_layer(layout: StageLayout, layer: int) -> Iterator[Action]:
    """Write the layer as it is now; its next update waits until the write has ended."""
    sizes = layout.graph.sizes
    if layout.kind(layer).frozen:
        return
    if not sizes.master:
        yield _write(layout, layer, parameter_home(layer), owned_parameter_bytes(layout, layer))
    for share in Share:
        if not layout.pieces[layer, share]:
            continue
        if share in IN_CHUNKS:
            elements, count = chunk_elements(layout, layer, share), layout.chunks(layer, share)
        else:
            elements, count = layout.pieces[layer, share], 1
        for chunk in range(count if sizes.state else 0):
            state = state_home(layer, share, chunk)
            nbytes = layout.graph.state_bytes(layout.kind(layer), elements)
            yield _write(layout, layer, state, nbytes, share)


def _write(
    layout: StageLayout, layer: int, source: Ref, nbytes: int, share: Share | None = None
) -> Action:
    at = share.tier if share else layout.table[layer].parameters
    staged = tuple(checkpoint_entry(layer, entry) for entry in range(STAGING))
    # Ranks with the same state share the writing: those of all zero groups, without ZeRO all ranks
    # unless experts are spread.
    strategy, spread = layout.graph.strategy, layout.kind(layer).ep > 1
    alike = 1 if spread else strategy.shards
    writers = strategy.zero_copies if strategy.zero else alike
    return Action(
        Op.CKPT,
        Lane.CHECKPOINT,
        layer,
        (source,),
        () if at is Tier.HOST else staged,
        amount=-(-nbytes // writers),
        share=share,
    )
