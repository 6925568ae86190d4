"""Checkpoint of one layer: actions that write its optimizer state, and its parameters.

Where the state holds a master copy, parameters are casts of it and are not written. Pieces in host
memory are written from where they are; the others pass through the staging ring `stage.c`.
"""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.lower.layout import STAGING, Layout
from bigplan.lower.sizes import chunks
from bigplan.placement import Tier
from bigplan.program import Action, Lane, Op, Ref


def checkpoint_layer(layout: Layout, layer: int) -> Iterator[Action]:
    """Write the layer as it is now; what updates it next waits until it is written."""
    sizes = layout.graph.sizes
    if not sizes.master:
        elements = layout.owned(layer, layout.kind(layer).parameters, from_zero=1)
        yield _write(layout, layer, Ref(f"w{layer}", f"w{layer}"), elements * sizes.parameter)
    for tier in (Tier.GPU, Tier.HOST):
        nbytes = layout.pieces[layer, tier] * sizes.state
        if nbytes:
            state = Ref(f"o{layer}.{tier}", f"o{layer}.{tier}")
            yield _write(layout, layer, state, nbytes, tier)
    count = chunks(layout, layer)
    for chunk in range(count):
        state = Ref(f"o{layer}.{Tier.NVME}", f"o{layer}.{chunk}", chunk)
        nbytes = -(-layout.pieces[layer, Tier.NVME] // count) * sizes.state
        yield _write(layout, layer, state, nbytes, Tier.NVME)


def _write(
    layout: Layout, layer: int, source: Ref, nbytes: int, piece: Tier | None = None
) -> Action:
    at = piece or layout.table[layer].parameters
    staged = tuple(Ref("stage.c", f"c{layer}", entry) for entry in range(STAGING))
    # Without ZeRO all ranks hold the same, and share the writing.
    writers = 1 if layout.graph.strategy.zero else layout.graph.strategy.dp
    return Action(
        Op.CKPT,
        Lane.CHECKPOINT,
        layer,
        (source,),
        () if at is Tier.HOST else staged,
        amount=-(-nbytes // writers),
        piece=piece,
    )
