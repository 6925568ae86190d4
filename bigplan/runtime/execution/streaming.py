"""STATE_IN and STATE_OUT: chunks of optimizer state that pass through the GPU for their update.

An entry of the ring holds the chunk's state as its home has it, then room for the rows' gradients
and for their parameters, each in the order of the chunk and from a multiple of ALIGNMENT bytes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bigplan.content import Holds
from bigplan.mechanics import ALIGNMENT
from bigplan.placement import Tier
from bigplan.program import Action, Ref
from bigplan.runtime.context import Context
from bigplan.runtime.execution.turns import Turns
from bigplan.runtime.memory.pieces import Box, merged
from bigplan.runtime.memory.slab import align_up


@dataclass(frozen=True, slots=True)
class StreamedChunk:
    """A chunk in its entry: its rows, their state in bytes, gradients and parameters."""

    boxes: tuple[Box, ...]
    state: Tensor
    gradients: Tensor
    weights: Tensor

    @classmethod
    def of(cls, context: Context, action: Action) -> StreamedChunk:
        """The chunk that an action brings, updates or takes back."""
        ref = next(ref for ref in (*action.reads, *action.writes) if ref.buffer == "stream")
        boxes, key = context.rows[action.layer].boxes(ref.content), context.entries.key(ref, action)
        elements, sizes = sum(box.count for box in boxes), context.graph.sizes
        state = context.state_bytes(action.layer, elements)
        gradients = align_up(state, ALIGNMENT)
        weights = align_up(gradients + elements * sizes.gradient, ALIGNMENT)
        view = partial(context.memory.view, key)
        return cls(
            boxes,
            view(torch.uint8, state),
            view(context.gradient_dtype, elements, gradients),
            view(context.parameter_dtype, elements, weights),
        )


def state_in(context: Context, action: Action) -> None:
    """Copy a chunk to the GPU, with what its update needs of gradients and parameters."""
    visit, (home, *others) = StreamedChunk.of(context, action), action.reads
    visit.state.copy_(_at_home(context, action, visit, home), non_blocking=True)
    for rows, own in _sides(context, action, visit, others):
        for box in merged(visit.boxes):
            rows[box.in_piece].copy_(own(box), non_blocking=True)


def state_out(context: Context, turns: Turns, action: Action) -> None:
    """Copy a chunk home, and its new parameters to theirs."""
    visit, (home, *others) = StreamedChunk.of(context, action), action.writes
    _at_home(context, action, visit, home).copy_(visit.state, non_blocking=True)
    for rows, own in _sides(context, action, visit, others):
        for box in merged(visit.boxes):
            own(box).copy_(rows[box.in_piece], non_blocking=True)
    if context.device.type == "cuda":
        turns.chunk_queued()


def _at_home(context: Context, action: Action, visit: StreamedChunk, home: Ref) -> Tensor:
    return context.memory.view(context.entries.key(home, action), torch.uint8, visit.state.numel())


def _sides(
    context: Context, action: Action, visit: StreamedChunk, refs: Iterable[Ref]
) -> Sequence[tuple[Tensor, Callable[[Box], Tensor]]]:
    """Rows in the entry, with what finds them among what the rank owns in host memory."""
    both = {Holds.GRADIENTS: visit.gradients, Holds.PARAMETERS: visit.weights}
    return [
        (rows, context.entries.boxed(ref, action, rows.dtype))
        for ref in refs
        for rows in (both[ref.content.kind],)
        if context.program.buffers[ref.buffer].tier is Tier.HOST
    ]
