"""The optimizer's update of one layer, share by share, with the moves it needs.

Rows with state on the GPU have their parameters and gradients there too. The others move:

    CPU     gradients    from the GPU (rows) or NVMe (whole) into staging, or already in host memory
            parameters   likewise, where no fp32 master copy makes reading them needless
            state        from NVMe in chunks of rows
            then         parameters back to the GPU (rows) or NVMe (whole), state chunks to NVMe
    GPU     state streamed from host memory in chunks of rows, with their gradients (and parameters,
            where no master copy is kept) unless those are on the GPU
            then         the chunks back, with their parameters unless those live on the GPU

Muon's products fill the GPU, so the layers that it updates are updated between passes, on the lane
of compute. A streamed one is one chunk.

An update of some rows does not wait for updates of others, though all write one layer's parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.lower.gradients import staged_gradient
from bigplan.lower.layout import StageLayout
from bigplan.lower.refs import CLIP, gradient_home, parameter_home, state_home
from bigplan.lower.sizes import (
    chunk_elements,
    cpu_piece,
    gathered_bytes,
    gradient_bytes,
    parameter_bytes,
)
from bigplan.placement import Share, Tier
from bigplan.program import Action, Lane, Op, Ref


def update_layer(layout: StageLayout, layer: int) -> Iterator[Action]:
    """All actions of the layer's update; its gradients are consumed."""
    yield from begin_update(layout, layer)
    yield from end_update(layout, layer)


def begin_update(layout: StageLayout, layer: int) -> Iterator[Action]:
    """Update the rows whose state the GPU does not hold."""
    yield from _streamed_updates(layout, layer)
    yield from _cpu_update(layout, layer)


def end_update(layout: StageLayout, layer: int) -> Iterator[Action]:
    """Update the rows whose state the GPU holds, after `begin_update`; gradients are consumed."""
    yield from _gpu_update(layout, layer)
    yield from _end(layout, layer)


def gathered(layout: StageLayout, layer: int) -> bool:
    """Whether ranks gather the parts of the layer's parameters that each of them has updated."""
    return layout.shards(layer, from_zero=1) and not layout.shards(layer, from_zero=3)


def _clip(layout: StageLayout) -> tuple[Ref, ...]:
    return (CLIP,) if layout.graph.deferred else ()


def _gpu_update(layout: StageLayout, layer: int) -> Iterator[Action]:
    weights, gradients = parameter_home(layer, Share.GPU), gradient_home(layer)
    if rows := layout.pieces[layer, Share.GPU]:
        kept = _kept(layout, layer, Share.GPU)
        reads = (weights, gradients, *kept, *_clip(layout))
        yield _update(layer, Lane.COMPUTE, reads, (weights, *kept), rows, Share.GPU)


def _end(layout: StageLayout, layer: int) -> Iterator[Action]:
    weights, gradients = parameter_home(layer), gradient_home(layer)
    # This waits for all updaters. On the lane of one updater it would hold up that lane's next
    # work.
    others = layout.pieces[layer, Share.STREAMED] or cpu_piece(layout, layer)
    lane = Lane.FREE if others else Lane.COMPUTE
    yield Action(Op.FREE, lane, layer, frees=(gradients,))
    if gathered(layout, layer):
        nbytes = gathered_bytes(layout, layer)
        yield Action(Op.GATHER, Lane.COMM, layer, (weights,), (weights,), amount=nbytes)


def _kept(layout: StageLayout, layer: int, share: Share) -> tuple[Ref, ...]:
    """The state of a share that is updated in its home, if the optimizer has any."""
    return (state_home(layer, share),) if layout.graph.sizes.state else ()


def _update(
    layer: int,
    lane: Lane,
    reads: tuple[Ref, ...],
    writes: tuple[Ref, ...],
    elements: int,
    share: Share,
) -> Action:
    return Action(Op.UPDATE, lane, layer, reads, writes, amount=elements, share=share)


def _streamed_updates(layout: StageLayout, layer: int) -> Iterator[Action]:
    for chunk in range(layout.chunks(layer, Share.STREAMED)):
        yield from _streamed_update(layout, layer, chunk)


def _streamed_update(layout: StageLayout, layer: int, chunk: int) -> Iterator[Action]:
    """Bring a chunk of state, and what its update needs besides, to the GPU and back."""
    at, sizes, share = layout.table[layer], layout.graph.sizes, Share.STREAMED
    weights, gradients = parameter_home(layer, share), gradient_home(layer)
    elements, home = chunk_elements(layout, layer, share), state_home(layer, share, chunk)
    entry = layout.first_chunks[layer, share] + chunk
    state = layout.graph.state_bytes(layout.kind(layer), elements)
    visiting = Ref("stream", home.content, entry)
    on_gpu = [
        ref
        for ref, tier in ((weights, at.parameters), (gradients, at.gradients))
        if tier is Tier.GPU
    ]
    needed = {gradients: sizes.gradient} | ({} if sizes.master else {weights: sizes.parameter})
    brought = {ref: size for ref, size in needed.items() if ref not in on_gpu}
    returned = {} if weights in on_gpu else {weights: sizes.parameter}
    # It waits for gradients that it does not bring, so that no chunk takes up an entry a step
    # ahead.
    yield Action(
        Op.STATE_IN,
        Lane.STATE_IN,
        layer,
        (home, *dict.fromkeys((gradients, *brought))),
        (visiting,),
        amount=state + elements * sum(brought.values()),
        share=share,
    )
    reads = (visiting, *_clip(layout), *(ref for ref in needed if ref in on_gpu))
    writes = (visiting, *(ref for ref in (weights,) if ref in on_gpu))
    lane = Lane.COMPUTE if layout.kind(layer).orthogonalised else Lane.GPU_UPDATE
    yield _update(layer, lane, reads, writes, elements, share)
    yield Action(
        Op.STATE_OUT,
        Lane.STATE_OUT,
        layer,
        (visiting,),
        (home, *returned),
        (visiting,),
        amount=state + elements * sum(returned.values()),
        share=share,
    )


def _cpu_update(layout: StageLayout, layer: int) -> Iterator[Action]:
    if not cpu_piece(layout, layer):
        return
    gradients, moves = _gradients_on_host(layout, layer)
    yield from moves
    weights, moves = _weights_on_host(layout, layer)
    yield from moves
    reads = (gradients, *_clip(layout), *(() if layout.graph.sizes.master else (weights,)))
    rows = layout.pieces[layer, Share.HOST]
    if rows:
        kept = _kept(layout, layer, Share.HOST)
        yield _update(layer, Lane.CPU, (*reads, *kept), (weights, *kept), rows, Share.HOST)
    yield from _chunk_updates(layout, layer, reads, weights)
    yield from _weights_home(layout, layer, weights)


def _chunk_updates(
    layout: StageLayout, layer: int, reads: tuple[Ref, ...], weights: Ref
) -> Iterator[Action]:
    """Read each chunk of state, update its rows, write it back."""
    share = Share.NVME
    if not (count := layout.chunks(layer, share)):
        return
    elements, first = chunk_elements(layout, layer, share), layout.first_chunks[layer, share]
    nbytes = layout.graph.state_bytes(layout.kind(layer), elements)
    for chunk in range(count):
        home = state_home(layer, share, chunk)
        staged = Ref("stage.o", home.content, first + chunk)
        there, back = ((home,), (staged,)), ((staged,), (home,), (staged,))
        yield Action(Op.READ, Lane.NVME_READ, layer, *there, amount=nbytes, share=share)
        yield _update(layer, Lane.CPU, (*reads, staged), (weights, staged), elements, share)
        yield Action(Op.WRITE, Lane.NVME_WRITE, layer, *back, amount=nbytes, share=share)


def _gradients_on_host(layout: StageLayout, layer: int) -> tuple[Ref, list[Action]]:
    """Where the CPU finds the gradients, and the move that brings them there."""
    at, home = layout.table[layer].gradients, gradient_home(layer)
    if at is Tier.HOST:
        return home, []
    staged = staged_gradient(layout, layer, home.content, layout.turns["stage.g"][layer])
    if at is Tier.NVME:
        nbytes = gradient_bytes(layout, layer)
        return staged, [Action(Op.READ, Lane.NVME_READ, layer, (home,), (staged,), amount=nbytes)]
    nbytes = cpu_piece(layout, layer) * layout.graph.sizes.gradient
    share = Share.HOST
    moved = Action(Op.GRAD_OUT, Lane.D2H, layer, (home,), (staged,), amount=nbytes, share=share)
    return staged, [moved]


def _weights_on_host(layout: StageLayout, layer: int) -> tuple[Ref, list[Action]]:
    """Where the CPU writes the new parameters (and, without a master copy, reads the old)."""
    at, home = layout.table[layer].parameters, parameter_home(layer, Share.HOST)
    if at is Tier.HOST:
        return home, []
    name = layout.graph.layers[layer]
    staged = Ref(f"stage.w.{name}", home.content, layout.turns["stage.w"][layer])
    if layout.graph.sizes.master:
        return staged, []
    if at is Tier.NVME:
        nbytes, source = parameter_bytes(layout, layer), parameter_home(layer)
        return staged, [Action(Op.READ, Lane.NVME_READ, layer, (source,), (staged,), amount=nbytes)]
    nbytes = cpu_piece(layout, layer) * layout.graph.sizes.parameter
    share = Share.HOST
    moved = Action(Op.PARAM_OUT, Lane.D2H, layer, (home,), (staged,), amount=nbytes, share=share)
    return staged, [moved]


def _weights_home(layout: StageLayout, layer: int, weights: Ref) -> Iterator[Action]:
    """New parameters go to where forward and backward find them."""
    at = layout.table[layer].parameters
    if at is Tier.GPU:
        nbytes = cpu_piece(layout, layer) * layout.graph.sizes.parameter
        home = parameter_home(layer, Share.HOST)
        yield Action(Op.LOAD, Lane.H2D, layer, (weights,), (home,), amount=nbytes, share=Share.HOST)
    elif at is Tier.NVME:
        nbytes = parameter_bytes(layout, layer)
        home = parameter_home(layer)
        yield Action(Op.WRITE, Lane.NVME_WRITE, layer, (weights,), (home,), amount=nbytes)
