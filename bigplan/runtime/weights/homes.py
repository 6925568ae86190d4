"""Values at the homes of a rank's parameters and optimizer state, whichever tier they are on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import NamedTuple, Self

import torch
from torch import Tensor

from bigplan.content import Content, Holds
from bigplan.mechanics import PAGE
from bigplan.rectangle import Rectangle
from bigplan.runtime.context import Context
from bigplan.runtime.cpu.cores import Cores
from bigplan.runtime.memory.buffers import Key
from bigplan.runtime.memory.moments import bytes_view
from bigplan.runtime.memory.pieces import merged
from bigplan.runtime.memory.slab import align_up, aligned_empty
from bigplan.runtime.weights.first_values import FirstValues, rows_to_make


class _StoredRange(NamedTuple):
    """Elements of a layer from `first` on, where they are kept: 1-D, in any precision."""

    first: int
    flat: Tensor

    @property
    def elements(self) -> range:
        """The elements of the layer that are kept here."""
        return range(self.first, self.first + len(self.flat))

    @classmethod
    def at_home(cls, at: int, elements: range, home: Tensor, dtype: torch.dtype) -> Self:
        """Elements of the layer from element `at` of their home's bytes on."""
        size = dtype.itemsize
        return cls(elements.start, home[at * size : (at + len(elements)) * size].view(dtype))

    def put(self, start: int, values: Tensor) -> None:
        """Copy those of the layer's elements from `start` on that are kept here."""
        low = max(start, self.first)
        high = min(start + len(values), self.elements.stop)
        if low < high:
            place = self.flat[low - self.first : high - self.first]
            place.copy_(values[low - start : high - start])


_Fill = Callable[[Sequence[range], Sequence[_StoredRange]], None]


def fill_first(context: Context, first: FirstValues, layers: Iterable[int] | None = None) -> None:
    """First weights and empty moments at the home of these layers, or of all and of adapters.

    Only elements that have a home are made, each once. Besides the plan's memory, a thread has at
    most two blocks of elements in fp32 (first_values.BLOCK), and one in another precision.
    """
    with Cores() as cores:
        for layer in context.rows if layers is None else layers:
            _fill_layer(context, layer, partial(_fill, context, layer, first, cores))


def _fill_layer(context: Context, layer: int, fill: _Fill) -> None:
    """Parameters together with the master copies of the same elements, then those without one."""
    sizes, dtype = context.graph.sizes, context.parameter_dtype
    held = context.entries.held(layer)
    left = [elements for _, elements in held]
    with _placed(context, layer, Content(Holds.PARAMETERS, layer)) as place:
        parameters = [_StoredRange.at_home(*one, place, dtype) for one in held]
        for share, chunk, boxes in context.rows[layer].state:
            if not boxes or not sizes.state:
                continue
            home = Content(Holds.STATE, layer, share, chunk)
            with _placed(context, layer, home) as state_place:
                elements = sum(box.count for box in boxes)
                state_place[: context.state_bytes(layer, elements)].zero_()
                master = context.state_of(layer, bytes_view(state_place), elements).master
                if master is not None:
                    masters = [
                        _StoredRange(box.start, master[box.in_piece]) for box in merged(boxes)
                    ]
                    made = [master.elements for master in masters]
                    fill(made, [*masters, *parameters])
                    left = list(without(left, made))
        fill(left, parameters)


def _fill(
    context: Context,
    layer: int,
    first: FirstValues,
    cores: Cores,
    ranges: Sequence[range],
    homes: Sequence[_StoredRange],
) -> None:
    """Make ranges of the layer's elements, and put them wherever some of them are kept."""
    kind, rows = context.kind(layer).name, context.rows[layer]
    parameters = {parameter.name: parameter for parameter in context.parameters(layer)}
    # As the model has them: values are drawn in blocks of these rows, whatever is stored of them.
    own = (*parameters.values(), *context.model.kinds().get(kind, ()))
    at_once = {parameter.name: rows_to_make(parameter, context.training) for parameter in own}

    def make(part: Rectangle) -> None:
        values = first(kind, layer, parameters[part.parameter], part).flatten()
        for home in homes:
            home.put(rows.element(part), values)

    fillings = (filling for elements in ranges for filling in rows.filling(elements))
    for filling, home in product(fillings, homes):
        home.put(filling.start, torch.zeros(len(filling)))
    together = (part for elements in ranges for _, part in rows.rectangles(elements))
    cores.run(partial(make, part) for one in together for part in one.bands(at_once[one.parameter]))


def without(ranges: Iterable[range], others: Iterable[range]) -> Iterator[range]:
    """The parts of the ranges that are in none of the others."""
    others = sorted(others, key=lambda other: other.start)
    for one in ranges:
        start = one.start
        for other in others:
            if start < min(other.start, one.stop):
                yield range(start, min(other.start, one.stop))
            start = max(start, other.stop)
        if start < one.stop:
            yield range(start, one.stop)


@contextmanager
def _placed(context: Context, layer: int, content: Content) -> Iterator[Tensor]:
    """Where a home is filled; tensors that live on disk are written there at the end."""
    key = context.entries.home(content)
    place = context.memory.place(passage(context, layer, key))
    yield place
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


def load(context: Context, content: Content) -> Tensor:
    """The bytes at the content's home, in host memory, padding included."""
    key = context.entries.home(content)
    if context.memory.on_disk(key):
        pages = aligned_empty(align_up(context.memory.buffers[key[0]].nbytes, PAGE))
        context.memory.read(key, pages)
        return pages
    return context.memory.place(key).cpu()
