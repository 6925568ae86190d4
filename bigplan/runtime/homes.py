"""Values at the homes of a rank's parameters and optimizer state, whichever tier they are on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from bigplan.content import Holds
from bigplan.runtime.context import Context
from bigplan.runtime.first_values import FirstValues
from bigplan.runtime.memory import Key
from bigplan.runtime.pieces import Box
from bigplan.runtime.slab import PAGE, align_up, aligned_empty
from bigplan.spec.model import Parameter


def fill_first(context: Context, first: FirstValues) -> None:
    """First weights and empty moments at the home of every layer.

    Beside what the plan promised, one layer's fp32 values and a tensor a thread are in memory.
    """
    for layer in context.program.layers:
        values = _layer_values(context, layer, first)
        _put(context, layer, (f"w{layer}", 0), values.to(context.parameter_dtype))
        for share, chunk, boxes in context.rows[layer].state:
            if boxes and context.graph.sizes.state:
                _put_state(context, layer, (f"o{layer}.{share}", chunk), boxes, values)


def _layer_values(context: Context, layer: int, first: FirstValues) -> Tensor:
    """A layer's first values, flat, fp32."""
    kind, offsets = context.graph.layers[layer], context.rows[layer].offsets
    values = torch.empty(context.kind(layer).parameters)

    def make(parameter: Parameter) -> None:
        start, rows, columns = offsets[parameter.name]
        values[start : start + rows * columns].copy_(first(kind, layer, parameter).flatten())

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a generator uses one thread
        list(pool.map(make, context.parameters(layer)))
    return values


def _put_state(
    context: Context, layer: int, key: Key, boxes: Sequence[Box], values: Tensor
) -> None:
    """Empty moments and, where the state has a master copy, the rows' first values."""
    elements, sizes = sum(box.count for box in boxes), context.graph.sizes
    place = context.memory.place(passage(context, layer, key))
    state = place[: sizes.state * elements].view(torch.float32).view(-1, elements)
    state.zero_()
    if sizes.master:
        for box in boxes:
            state[-1][box.in_piece].copy_(values[box.in_layer])
    if context.memory.on_disk(key):
        context.memory.write(key, place)


def _put(context: Context, layer: int, key: Key, values: Tensor) -> None:
    place = context.memory.place(passage(context, layer, key))
    place[: values.nbytes].copy_(values.view(torch.uint8))
    if context.memory.on_disk(key):
        context.memory.write(key, place)


def passage(context: Context, layer: int, key: Key) -> Key:
    """Where the entry is filled: in its place, or in the staging that leads to its disk."""
    if not context.memory.on_disk(key):
        return key
    home = context.memory.buffers[key[0]].home_of
    if home is not None and home.kind is Holds.PARAMETERS:
        return f"stage.w.{context.graph.layers[layer]}", 0
    return "stage.o", 0


def load(context: Context, name: str, entry: int) -> Tensor:
    """A buffer's bytes in host memory, padding included."""
    key = (name, entry)
    if context.memory.on_disk(key):
        pages = aligned_empty(align_up(context.memory.buffers[name].nbytes, PAGE))
        context.memory.read(key, pages)
        return pages
    return context.memory.place(key).cpu()
