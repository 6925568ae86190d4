"""One micro-batch in one layer: compute, its activations' moves, and messages to the neighbours.

Actions are written for micro-batch 0; the caller moves them to the one it means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bigplan.lower.refs import BATCH, Refs, hidden, kept
from bigplan.lower.sizes import batch_bytes, hidden_bytes, kept_bytes
from bigplan.placement import Tier
from bigplan.program import Action, Lane, Op, Ref


def data(refs: Refs, layer: int) -> Iterator[Action]:
    """The batch, before the stage's layer that asks for it first."""
    if layer == refs.layout.takes_batch:
        nbytes = batch_bytes(refs.layout)
        yield Action(Op.DATA, Lane.DATA, layer, writes=(BATCH,), amount=nbytes, micro_batch=0)


def forward(refs: Refs, layer: int, *, keeps: bool = True) -> Action:
    """The layer's forward; one that keeps nothing has no backward, and of the loss layer is all."""
    reads, writes = [*refs.tables(layer)], []
    if keeps:
        writes.append(refs.passing(layer, forward=True))
    if layer > 0:
        reads.append(hidden("h", layer - 1))
    if layer == 0 or (layer == refs.layout.loss and not keeps):
        reads.append(BATCH)
    if layer < len(refs.layout.graph.layers) - 1:
        writes.append(hidden("h", layer))
    return Action(Op.FORWARD, Lane.COMPUTE, layer, tuple(reads), tuple(writes), micro_batch=0)


def backward(refs: Refs, layer: int, adds_to: Sequence[Ref]) -> Action:
    """The layer's backward; gradient sums that it does not add to, it starts."""
    layout, passing = refs.layout, refs.passing(layer, forward=False)
    reads = [*refs.tables(layer), passing, *adds_to]
    writes = [*refs.sums(layer)]
    if layer == layout.loss:
        reads.append(BATCH)
    else:
        reads.append(hidden(layout.gradient_ring, layer, gradient=True))
    if layer > 0:
        writes.append(hidden(layout.gradient_ring, layer - 1, gradient=True))
    return Action(
        Op.BACKWARD,
        Lane.COMPUTE,
        layer,
        tuple(reads),
        tuple(writes),
        frees=(passing,),
        micro_batch=0,
        recompute=layout.table[layer].recompute,
    )


def save(refs: Refs, layer: int) -> Iterator[Action]:
    """Move what the layer keeps of the micro-batch off the GPU."""
    at, nbytes = refs.layout.table[layer].activations, kept_bytes(refs.layout, layer)
    if at is Tier.GPU:
        return
    source = refs.passing(layer, forward=True)
    target = kept(layer) if at is Tier.HOST else refs.staged(layer, forward=True)
    yield Action(Op.SAVE, Lane.D2H, layer, (source,), (target,), (source,), nbytes, 0)
    if at is Tier.NVME:
        move = ((target,), (kept(layer),), (target,), nbytes, 0)
        yield Action(Op.WRITE, Lane.NVME_WRITE, layer, *move)


def fetch(refs: Refs, layer: int) -> Iterator[Action]:
    """Bring it back before the micro-batch's backward."""
    at, nbytes = refs.layout.table[layer].activations, kept_bytes(refs.layout, layer)
    if at is Tier.GPU:
        return
    source = kept(layer)
    if at is Tier.NVME:
        staged = refs.staged(layer, forward=False)
        move = ((source,), (staged,), (source,), nbytes, 0)
        yield Action(Op.READ, Lane.NVME_READ, layer, *move)
        source = staged
    passing = refs.passing(layer, forward=False)
    yield Action(Op.FETCH, Lane.H2D, layer, (source,), (passing,), (source,), nbytes, 0)


def receive(refs: Refs, layer: int, *, forward: bool) -> Iterator[Action]:
    """The message that a chunk's first layer of a pass waits for."""
    if layer in (refs.layout.starts if forward else refs.layout.ends):
        ref = hidden("h", layer - 1) if forward else hidden("d", layer, gradient=True)
        nbytes = hidden_bytes(refs.layout)
        yield Action(Op.RECV, Lane.RECV, layer, writes=(ref,), amount=nbytes, micro_batch=0)


def send(refs: Refs, layer: int, *, forward: bool) -> Iterator[Action]:
    """The message that a chunk's last layer of a pass sends on."""
    if layer in (refs.layout.ends if forward else refs.layout.starts):
        ref = hidden("h", layer) if forward else hidden("d", layer - 1, gradient=True)
        nbytes = hidden_bytes(refs.layout)
        yield Action(Op.SEND, Lane.SEND, layer, reads=(ref,), amount=nbytes, micro_batch=0)
