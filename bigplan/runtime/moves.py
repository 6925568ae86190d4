"""Actions that copy bytes between tiers, and the gradient reduction."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from bigplan.program import ROWS, Action, Op
from bigplan.runtime.context import Context
from bigplan.runtime.kept import Kept, queue_copy

PIECE = 256 << 20  # bytes of a copy that lets others have the engine, 5 ms


def move(context: Context, action: Action, kept: Callable[[Action], Kept]) -> None:
    """Copy what the action reads to where it writes. `kept`: activations of its micro-batch."""
    source, target = (context.key(refs[0], action) for refs in (action.reads, action.writes))
    memory = context.memory
    if memory.on_disk(source):
        memory.read(source, memory.place(target))
    elif memory.on_disk(target):
        memory.write(target, memory.place(source))
    elif action.op is Op.SAVE:
        copy = copy_in_turns if "stream" in context.program.buffers else queue_copy
        memory.storages[source] = kept(action).move_out(memory.place(target), copy)
    elif action.op is Op.FETCH:
        left = memory.storages.pop(target, [])
        kept(action).fetch(memory.place(source), left, context.device)
    elif ROWS in (source[0], target[0]):
        rows = slice(action.amount)  # without padding, which differs
        memory.place(target)[rows].copy_(memory.place(source)[rows], non_blocking=True)
    else:
        _copy(context, action, memory.place(source), memory.place(target))


def copy_in_turns(target: Tensor, source: Tensor) -> None:
    """Queue a piece once the one before has arrived, so that chunks of state may leave in between.

    Those of 5.5B with 16k tokens a step waited 15 to 30 ms for the activations of a micro-batch or
    two, and the next chunks with them: 0.2 s of a step of 2.0 (H200, benchmarks/LOG.md).
    """
    for start in range(0, source.numel(), PIECE):
        part = slice(start, start + PIECE)
        queue_copy(target[part], source[part])
        if source.is_cuda:
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record()
            arrived.synchronize()


def _copy(context: Context, action: Action, source: Tensor, target: Tensor) -> None:
    """Parameters or gradients: a whole layer, or the rows that the CPU updates."""
    is_gradient = action.op is Op.GRAD_OUT
    dtype = context.gradient_dtype if is_gradient else context.parameter_dtype
    elements = context.kind(action.layer).parameters
    boxes = context.rows[action.layer].cpu_boxes
    by_rows = action.amount < elements * dtype.itemsize
    assert not by_rows or action.amount == sum(b.count for b in boxes) * dtype.itemsize
    spans = [(b.start, b.count) for b in boxes] if by_rows else [(0, elements)]
    for start, count in spans:
        low, high = start * dtype.itemsize, (start + count) * dtype.itemsize
        target[low:high].copy_(source[low:high], non_blocking=True)


def reduce(context: Context, action: Action) -> None:
    """Sum a layer's gradients over the ranks."""
    gradients = context.flat(action.reads[0], action, context.gradient_dtype)
    dist.all_reduce(gradients)


def mean_loss(losses: list[Tensor], world: int) -> float:
    """The step's loss: every rank holds its micro-batches' shares."""
    total = torch.stack(losses).sum()
    if world > 1:
        dist.all_reduce(total)
    return float(total)
