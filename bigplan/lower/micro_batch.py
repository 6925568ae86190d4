"""One micro-batch in one layer: compute, its activations' moves, and messages to the neighbours.

Actions are written for micro-batch 0; the caller numbers them for the micro-batch that it means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bigplan.lower.entries import looked_up_bytes, row_bytes
from bigplan.lower.refs import (
    BATCH,
    Refs,
    gradient_home,
    hidden,
    hidden_gradient,
    kept,
    parameter_home,
    row_gradients,
    rows,
)
from bigplan.lower.sizes import batch_bytes, gradient_bytes, hidden_bytes, kept_bytes
from bigplan.placement import Tier
from bigplan.program import ROWS, STAGED_ROWS, Action, Lane, Op, Ref


def data(refs: Refs, layer: int) -> Iterator[Action]:
    """The transfer of the batch, before the stage's layer that needs it first."""
    if layer == refs.layout.position.takes_batch:
        nbytes = batch_bytes(refs.layout)
        yield Action(Op.DATA, Lane.DATA, layer, writes=(BATCH,), amount=nbytes, micro_batch=0)


def look_up(refs: Refs, layer: int) -> Iterator[Action]:
    """The transfer of the table rows that the layer reads from host memory to the GPU."""
    if refs.layout.looked_up(layer):
        nbytes, home = looked_up_bytes(refs.layout.graph), parameter_home(layer)
        staged, there = rows(STAGED_ROWS, layer), rows(ROWS, layer)
        # This is not on the CPU's lane, where it would wait for all earlier sums of the unit.
        yield Action(Op.LOOK_UP, Lane.DATA, layer, (home, BATCH), (staged,), (), nbytes, 0)
        yield Action(Op.LOAD, Lane.H2D, layer, (staged,), (there,), (staged,), nbytes, 0)


def rows_home(refs: Refs, layer: int, *, adds: bool) -> Iterator[Action]:
    """Add the rows' gradients to their sum in host memory; a step's first clears the sum."""
    if refs.layout.looked_up(layer) and not refs.layout.kind(layer).frozen:
        nbytes, total = looked_up_bytes(refs.layout.graph), gradient_home(layer)
        there, staged = row_gradients(ROWS, layer), row_gradients(STAGED_ROWS, layer)
        yield Action(Op.GRAD_OUT, Lane.D2H, layer, (there,), (staged,), (there,), nbytes, 0)
        # An accumulation takes three times its amount; clearing a sum takes its bytes once.
        added = row_bytes(refs.layout.kind(layer)) // 3
        cleared = 0 if adds else gradient_bytes(refs.layout, layer) // 3
        reads = (staged, total) if adds else (staged,)
        move = (reads, (total,), (staged,), added + cleared, 0)
        yield Action(Op.ACCUMULATE, Lane.CPU, layer, *move)


def forward(refs: Refs, layer: int, *, keeps: bool = True) -> Action:
    """The layer's forward; without `keeps` it has no backward, and the loss layer ends with it."""
    looked_up = [rows(ROWS, layer)] if refs.layout.looked_up(layer) else []
    reads, writes = [*(looked_up or refs.tables(layer))], []
    if keeps:
        writes.append(refs.passing(layer, forward=True))
    if layer > 0:
        reads.append(hidden(layer - 1))
    if layer == 0 or (layer == refs.layout.position.loss and not keeps):
        reads.append(BATCH)
    if layer < len(refs.layout.graph.layers) - 1:
        writes.append(hidden(layer))
    move = (tuple(reads), tuple(writes), tuple(looked_up))
    return Action(Op.FORWARD, Lane.COMPUTE, layer, *move, micro_batch=0)


def backward(refs: Refs, layer: int, adds_to: Sequence[Ref]) -> Action:
    """The layer's backward; it starts those gradient sums that are not in `adds_to`."""
    layout, passing = refs.layout, refs.passing(layer, forward=False)
    if layout.looked_up(layer):
        reads = [passing]
        writes = [] if layout.kind(layer).frozen else [row_gradients(ROWS, layer)]
    else:
        idle = layout.kind(layer).idle_backward
        reads = [*(() if idle else refs.tables(layer)), passing, *adds_to]
        writes = [*refs.sums(layer)]
    if layer == layout.position.loss:
        reads.append(BATCH)
    else:
        reads.append(hidden_gradient(layout.position.gradient_ring, layer))
    if layer > 0:
        writes.append(hidden_gradient(layout.position.gradient_ring, layer - 1))
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


def save(refs: Refs, layer: int, *, beside_update: bool = False) -> Iterator[Action]:
    """Move what the layer keeps of the micro-batch off the GPU."""
    at, nbytes = refs.layout.table[layer].activations, kept_bytes(refs.layout, layer)
    if at is Tier.GPU or refs.layout.stays(layer):
        return
    source = refs.passing(layer, forward=True)
    target = kept(layer) if at is Tier.HOST else refs.staged(layer, forward=True)
    move = ((source,), (target,), (source,), nbytes, 0)
    yield Action(Op.SAVE, Lane.D2H, layer, *move, beside_update=beside_update)
    if at is Tier.NVME:
        move = ((target,), (kept(layer),), (target,), nbytes, 0)
        yield Action(Op.WRITE, Lane.NVME_WRITE, layer, *move)


def fetch(refs: Refs, layer: int) -> Iterator[Action]:
    """Bring kept activations back before the micro-batch's backward."""
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
    if layer in (refs.layout.position.starts if forward else refs.layout.position.ends):
        ref = hidden(layer - 1) if forward else hidden_gradient("d", layer)
        nbytes = hidden_bytes(refs.layout)
        yield Action(Op.RECV, Lane.RECV, layer, writes=(ref,), amount=nbytes, micro_batch=0)


def send(refs: Refs, layer: int, *, forward: bool) -> Iterator[Action]:
    """The message that a chunk's last layer of a pass sends on."""
    if layer in (refs.layout.position.ends if forward else refs.layout.position.starts):
        ref = hidden(layer) if forward else hidden_gradient("d", layer - 1)
        nbytes = hidden_bytes(refs.layout)
        yield Action(Op.SEND, Lane.SEND, layer, reads=(ref,), amount=nbytes, micro_batch=0)
