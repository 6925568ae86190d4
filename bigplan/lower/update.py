"""The optimizer's update of one layer, piece by piece, with the moves it needs.

A piece is the rows whose optimizer state is on one tier. Rows with state on the GPU have their
parameters and gradients there too, so only the CPU's pieces move anything:

    gradients    from the GPU (rows) or NVMe (whole) into staging, or already in host memory
    parameters   likewise, where no fp32 master copy makes reading them needless
    state        from NVMe in chunks of rows
    then         parameters back to the GPU (rows) or NVMe (whole), state chunks back to NVMe
"""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.lower.gradients import staged_gradient
from bigplan.lower.layout import Layout
from bigplan.lower.sizes import (
    chunks,
    cpu_piece,
    full_parameter_bytes,
    gradient_bytes,
    parameter_bytes,
)
from bigplan.placement import Tier
from bigplan.program import Action, Lane, Op, Ref


def update_layer(layout: Layout, layer: int) -> Iterator[Action]:
    """All actions of the layer's update; its gradients are consumed."""
    weights, gradients = Ref(f"w{layer}", f"w{layer}"), Ref(f"g{layer}", f"g{layer}")
    clip = (Ref("clip", "clip"),) if layout.graph.deferred else ()
    on_gpu = layout.pieces[layer, Tier.GPU]
    if on_gpu:
        state = Ref(f"o{layer}.gpu", f"o{layer}.gpu")
        kept = (state,) if layout.graph.sizes.state else ()
        reads = (weights, gradients, *kept, *clip)
        yield Action(
            Op.UPDATE, Lane.COMPUTE, layer, reads, (weights, *kept), amount=on_gpu, piece=Tier.GPU
        )
    if cpu_piece(layout, layer):
        yield from _cpu_update(layout, layer, clip)
    # On the last updater's lane: elsewhere it would hold up that lane until the update is done.
    lane = Lane.CPU if cpu_piece(layout, layer) else Lane.COMPUTE
    yield Action(Op.FREE, lane, layer, frees=(gradients,))
    if layout.shards(layer, from_zero=1) and not layout.shards(layer, from_zero=3):
        nbytes = full_parameter_bytes(layout, layer)
        yield Action(Op.GATHER, Lane.COMM, layer, (weights,), (weights,), amount=nbytes)


def _cpu_update(layout: Layout, layer: int, clip: tuple[Ref, ...]) -> Iterator[Action]:
    gradients, moves = _gradients_on_host(layout, layer)
    yield from moves
    weights, moves = _weights_on_host(layout, layer)
    yield from moves
    reads = (gradients, *clip, *(() if layout.graph.sizes.master else (weights,)))
    rows = layout.pieces[layer, Tier.HOST]
    if rows:
        state = Ref(f"o{layer}.host", f"o{layer}.host")
        kept = (state,) if layout.graph.sizes.state else ()
        yield Action(
            Op.UPDATE,
            Lane.CPU,
            layer,
            (*reads, *kept),
            (weights, *kept),
            amount=rows,
            piece=Tier.HOST,
        )
    for chunk in range(chunks(layout, layer)):
        yield from _chunk_update(layout, layer, chunk, reads, weights)
    yield from _weights_home(layout, layer, weights)


def _chunk_update(
    layout: Layout, layer: int, chunk: int, reads: tuple[Ref, ...], weights: Ref
) -> Iterator[Action]:
    """Read a chunk of state, update its rows, write it back."""
    elements = -(-layout.pieces[layer, Tier.NVME] // chunks(layout, layer))
    nbytes = elements * layout.graph.sizes.state
    home = Ref(f"o{layer}.nvme", f"o{layer}.{chunk}", chunk)
    staged = Ref("stage.o", f"o{layer}.{chunk}", chunk)
    yield Action(Op.READ, Lane.NVME_READ, layer, (home,), (staged,), amount=nbytes, piece=Tier.NVME)
    yield Action(
        Op.UPDATE,
        Lane.CPU,
        layer,
        (*reads, staged),
        (weights, staged),
        amount=elements,
        piece=Tier.NVME,
    )
    yield Action(
        Op.WRITE,
        Lane.NVME_WRITE,
        layer,
        (staged,),
        (home,),
        (staged,),
        amount=nbytes,
        piece=Tier.NVME,
    )


def _gradients_on_host(layout: Layout, layer: int) -> tuple[Ref, list[Action]]:
    """Where the CPU finds the gradients, and the move that brings them there."""
    at, home = layout.table[layer].gradients, Ref(f"g{layer}", f"g{layer}")
    if at is Tier.HOST:
        return home, []
    staged = staged_gradient(layout, layer, f"g{layer}", layout.turns["stage.g"][layer])
    if at is Tier.NVME:
        nbytes = gradient_bytes(layout, layer)
        return staged, [Action(Op.READ, Lane.NVME_READ, layer, (home,), (staged,), amount=nbytes)]
    nbytes = cpu_piece(layout, layer) * layout.graph.sizes.gradient
    return staged, [Action(Op.GRAD_OUT, Lane.D2H, layer, (home,), (staged,), amount=nbytes)]


def _weights_on_host(layout: Layout, layer: int) -> tuple[Ref, list[Action]]:
    """Where the CPU writes the new parameters (and, without a master copy, reads the old)."""
    at, home = layout.table[layer].parameters, Ref(f"w{layer}", f"w{layer}")
    if at is Tier.HOST:
        return home, []
    name = layout.graph.layers[layer]
    staged = Ref(f"stage.w.{name}", f"w{layer}", layout.turns["stage.w"][layer])
    if layout.graph.sizes.master:
        return staged, []
    if at is Tier.NVME:
        nbytes = parameter_bytes(layout, layer)
        return staged, [Action(Op.READ, Lane.NVME_READ, layer, (home,), (staged,), amount=nbytes)]
    nbytes = cpu_piece(layout, layer) * layout.graph.sizes.parameter
    return staged, [Action(Op.PARAM_OUT, Lane.D2H, layer, (home,), (staged,), amount=nbytes)]


def _weights_home(layout: Layout, layer: int, weights: Ref) -> Iterator[Action]:
    """New parameters go to where forward and backward find them."""
    at, home = layout.table[layer].parameters, Ref(f"w{layer}", f"w{layer}")
    if at is Tier.GPU:
        nbytes = cpu_piece(layout, layer) * layout.graph.sizes.parameter
        yield Action(Op.LOAD, Lane.H2D, layer, (weights,), (home,), amount=nbytes, piece=Tier.HOST)
    elif at is Tier.NVME:
        nbytes = parameter_bytes(layout, layer)
        yield Action(Op.WRITE, Lane.NVME_WRITE, layer, (weights,), (home,), amount=nbytes)
