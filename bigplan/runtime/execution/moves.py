"""Actions that copy bytes between tiers, and the gradient reduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bigplan.content import Holds
from bigplan.program import ROWS, Action, Op, Ref
from bigplan.runtime.context import Context
from bigplan.runtime.execution.turns import Turns
from bigplan.runtime.layers.carried import message_width
from bigplan.runtime.layers.kept import KeptActivations, queue_copy
from bigplan.runtime.layers.preference import REWARDS, named_rewards
from bigplan.runtime.parallel.groups import Groups


def move(
    context: Context, turns: Turns, kept: Callable[[Action], KeptActivations], action: Action
) -> None:
    """Copy what the action reads to where it writes. `kept`: activations of its micro-batch."""
    source, target = (
        context.entries.key(refs[0], action) for refs in (action.reads, action.writes)
    )
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
        _copy(context, action)


def _copy(context: Context, action: Action) -> None:
    """Parameters or gradients that this rank owns: of the whole layer, or what an updater needs."""
    is_gradient = action.op is Op.GRAD_OUT
    dtype = context.gradient_dtype if is_gradient else context.parameter_dtype
    part = context.rows[action.layer].moved(action.share)
    both = (
        context.entries.owned(refs[0], action, dtype, part)
        for refs in (action.reads, action.writes)
    )
    for source, target in zip(*both, strict=True):
        target.copy_(source, non_blocking=True)


def send(context: Context, action: Action) -> None:
    """A hidden state to the next stage, or the gradient by one to the stage before.

    Also a table's parameters from the first stage to the last, and their gradients back.
    """
    (ref,) = action.reads
    if context.program.buffers[ref.buffer].dynamic:
        values = context.memory.dynamic[context.entries.key(ref, action)]
        assert isinstance(values, Tensor)
    else:
        values = _table(context, ref, action)
    context.groups.send(ref.content.kind, values.detach().contiguous())


def _table(context: Context, ref: Ref, action: Action) -> Tensor:
    is_parameters = ref.content.kind is Holds.PARAMETERS
    dtype = context.parameter_dtype if is_parameters else context.gradient_dtype
    return context.entries.flat(ref, action, dtype)


def receive(context: Context, compute: torch.cuda.Stream | None, action: Action) -> None:
    """The message that the action writes; `compute`: the stream that will read it, if any."""
    (ref,), length = action.writes, context.length
    if not context.program.buffers[ref.buffer].dynamic:
        context.groups.receive(ref.content.kind, _table(context, ref, action))
        return
    batch, width = context.graph.strategy.micro_batch, message_width(context.model)
    shape = context.tensor_parallel.hidden(batch, length, width)
    values = torch.empty(shape, dtype=context.parameter_dtype, device=context.device)
    if compute is not None:  # who lets go of it does not wait until it is read
        values.record_stream(compute)
    context.groups.receive(ref.content.kind, values)
    context.memory.dynamic[context.entries.key(ref, action)] = values


def mean_loss(losses: list[Tensor], groups: Groups) -> float:
    """The step's loss: ranks with the last layer hold their micro-batches' shares.

    Tensor-parallel ones hold the same, which counts once.
    """
    counts = losses and groups.at.tensor == 0
    mine = torch.stack(losses).sum().cpu() if counts else torch.zeros(())
    return float(groups.sum_of_all(mine))


def mean_rewards(rewards: list[Tensor], groups: Groups) -> Mapping[str, float]:
    """The step's means over pairs, likewise."""
    counts = rewards and groups.at.tensor == 0
    mine = torch.stack(rewards).sum(0).cpu() if counts else torch.zeros(len(REWARDS))
    return named_rewards(groups.sum_of_all(mine))


def tensor_reduce(context: Context, action: Action) -> None:
    """Sum gradients of parameters that several tensor-parallel ranks share, over those ranks.

    All ranks take part at once: each group of sharing ranks has a separate place in the sum.
    """
    group = context.groups.tensor
    total = context.entries.flat(action.reads[0], action, context.gradient_dtype)
    for holders, part in context.kind(action.layer).repeated:
        mine = total[part.start : part.stop]
        if holders == group.size:
            group.all_reduce(mine)
            continue
        places = mine.new_zeros(group.size // holders, len(part))
        places[group.place // holders].copy_(mine)
        group.all_reduce(places)
        mine.copy_(places[group.place // holders])


def reduce(context: Context, action: Action) -> None:
    """Sum a layer's gradients over the ranks; where ZeRO shards state, each gets its own part.

    A zero group sums its own ranks' alone.
    """
    scatters = context.entries.sharers(action.layer) > 1
    for group, total in context.entries.shared_out(action.reads[0], action, context.gradient_dtype):
        if scatters:
            group.reduce_scatter(total)
        else:  # of adapters each rank of each zero group has all
            group.all_reduce(total)
            context.groups.replica.all_reduce(total)


def sum_replicas(context: Context, action: Action) -> None:
    """Sum this rank's part of a layer's gradients over the zero groups, in place.

    It runs on the lane of `reduce` and `gather`, so on every rank the collectives of both
    communicators begin in the order of the program, one after the other on one stream.
    """
    for mine in context.entries.owned(action.reads[0], action, context.gradient_dtype):
        context.groups.replica.all_reduce(mine)


def gather(context: Context, action: Action) -> None:
    """Every rank's part of a layer's parameters to all ranks."""
    (source,), (target,) = action.reads, action.writes
    dtype = context.parameter_dtype
    parts = zip(
        context.entries.shared_out(target, action, dtype),
        context.entries.owned(source, action, dtype),
        strict=True,
    )
    for (group, whole), mine in parts:
        group.all_gather(whole, mine)
