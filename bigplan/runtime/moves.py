"""Actions that copy bytes between tiers, and the gradient reduction."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from bigplan.program import ROWS, Action, Op
from bigplan.runtime.context import Context
from bigplan.runtime.kept import Kept, queue_copy
from bigplan.runtime.turns import Turns


def move(context: Context, turns: Turns, kept: Callable[[Action], Kept], action: Action) -> None:
    """Copy what the action reads to where it writes. `kept`: activations of its micro-batch."""
    source, target = (context.key(refs[0], action) for refs in (action.reads, action.writes))
    memory = context.memory
    if memory.on_disk(source):
        memory.read(source, memory.place(target))
    elif memory.on_disk(target):
        memory.write(target, memory.place(source))
    elif action.op is Op.SAVE:
        copy = turns.copy if "stream" in context.program.buffers else queue_copy
        memory.storages[source] = kept(action).move_out(memory.place(target), copy)
    elif action.op is Op.FETCH:
        left = memory.storages.pop(target, [])
        kept(action).fetch(memory.place(source), left, context.device)
    elif ROWS in (source[0], target[0]):
        rows = slice(action.amount)  # without padding, which differs
        memory.place(target)[rows].copy_(memory.place(source)[rows], non_blocking=True)
    else:
        _copy(context, action, memory.place(source), memory.place(target))


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
