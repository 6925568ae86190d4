"""Which bytes of a rank's buffers are a layer's state, and how a file of it is laid out.

    8 bytes: length of the header; the header, JSON, padded with spaces to a whole page;
    then image after image: the pages of a buffer entry that have state in them

An image is a buffer entry as it is in memory: the moments (and master copy) of a piece one after
the other, or fp32 parameters. So a piece in host memory is written from its place, with O_DIRECT,
and the file is still a valid safetensors file. That format allows no gaps, so filling is a tensor,
too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from bigplan.content import ADAPTERS, Content, Holds
from bigplan.mechanics import PAGE
from bigplan.rectangle import Rectangle
from bigplan.runtime.context import Context
from bigplan.runtime.manifest import ELEMENT, Kind, StoredTensor
from bigplan.runtime.memory import Key
from bigplan.runtime.pieces import Box, LayerRows
from bigplan.runtime.slab import align_up
from bigplan.spec.optimizer import full_name

_MOMENTS: Mapping[str, tuple[Kind, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum",),
}


@dataclass(frozen=True, slots=True)
class Span:
    """A rectangle of one kind in an image, row by row from element `start` of the image on."""

    rectangle: Rectangle
    kind: Kind
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    experts: int = 0  # as Parameter has it

    @property
    def stop(self) -> int:
        """The element after its last."""
        return self.start + self.rectangle.elements


@dataclass(frozen=True, slots=True)
class Image:
    """State in a buffer entry, from byte `offset` of the entry on, its spans in order.

    Files and transfers have the entry's whole pages, so up to a page before the image is stored,
    too. Elements in no span are filling, and zero in memory.
    """

    key: Key
    spans: tuple[Span, ...]
    elements: int
    offset: int = 0

    @property
    def filling(self) -> Iterator[range]:
        """The image's elements that are in no span."""
        start = 0
        for span in self.spans:
            if start < span.start:
                yield range(start, span.start)
            start = span.stop
        if start < self.elements:
            yield range(start, self.elements)

    @property
    def before(self) -> int:
        """Bytes of its first page that are not its own."""
        return self.offset % PAGE

    @property
    def first_page(self) -> int:
        """The byte of the entry where what is stored of it begins."""
        return self.offset - self.before

    @property
    def nbytes(self) -> int:
        """What is stored of the entry, with the bytes before."""
        return self.before + self.elements * ELEMENT


def state_kinds(context: Context) -> tuple[Kind, ...]:
    """What an optimizer state buffer holds, in its order."""
    optimizer = context.training.optimizer
    names = _MOMENTS[optimizer.name]
    master: tuple[Kind, ...] = ("master",) if context.graph.sizes.master else ()
    kinds = (*names[: optimizer.moments], *master)
    assert context.graph.sizes.state == ELEMENT * len(kinds), (context.graph.sizes, kinds)
    return kinds


def written_images(context: Context, layer: int) -> tuple[Image, ...]:
    """The images of the layer that this rank has to store.

    These are its pieces and, without a master copy, the parameters that it updates. The buffer may
    also hold parameters of other ranks.
    """
    rows, states = context.rows[layer], state_images(context, layer)
    images = tuple(mine for image in states for mine in _to_store(rows, image))
    if context.graph.sizes.master:
        return images
    parameters = parameter_images(
        context, layer, "weights", [own.stored for own in rows.part.ranges]
    )
    return (*parameters, *images)


def _to_store(rows: LayerRows, image: Image) -> Iterator[Image]:
    """The image where all of it is this rank's to store, else one of what is of every kind."""
    mine = [span for span in image.spans if rows.part.stores(rows.element(span.rectangle))]
    if mine and len(mine) == len(image.spans):
        yield image
        return
    for _, alike in groupby(mine, key=lambda span: span.kind):
        spans = tuple(alike)
        first = spans[0].start
        spans = tuple(replace(span, start=span.start - first) for span in spans)
        yield Image(image.key, spans, spans[-1].stop, image.offset + first * ELEMENT)


def state_images(context: Context, layer: int) -> tuple[Image, ...]:
    """The layer's optimizer state on this rank, piece by piece."""
    images, kinds = [], state_kinds(context)
    for share, chunk, boxes in context.rows[layer].state:
        spans = tuple(_spans(context, layer, boxes, kinds))
        if boxes and kinds:
            home = context.home(Content(Holds.STATE, layer, share, chunk))
            images.append(Image(home, spans, len(kinds) * sum(box.count for box in boxes)))
    return tuple(images)


def parameter_images(
    context: Context, layer: int, kind: Kind, ranges: Sequence[range] | None = None
) -> tuple[Image, ...]:
    """Elements of the layer's parameters in this rank's buffer, all by default, stored as `kind`.

    There is an image for each range with elements of parameters. Its offset is for parameters of
    fp32, the only ones that are stored as they are.
    """
    held, home = context.held(layer), context.home(Content(Holds.PARAMETERS, layer))
    found = []
    for wanted in [own for _, own in held] if ranges is None else ranges:
        boxes = tuple(context.rows[layer].boxes_of(wanted))
        spans = tuple(_spans(context, layer, boxes, (kind,)))
        if spans:
            place = next(at + wanted.start - own.start for at, own in held if wanted.start in own)
            found.append(Image(home, spans, len(wanted), place * ELEMENT))
    return tuple(found)


def _spans(
    context: Context, layer: int, boxes: Sequence[Box], kinds: Sequence[Kind]
) -> Iterator[Span]:
    parameters = {parameter.name: parameter for parameter in context.parameters(layer)}
    rows, elements = context.rows[layer], sum(box.count for box in boxes)
    for number, kind in enumerate(kinds):
        for box in boxes:
            place = number * elements + box.place - box.start
            whole = parameters[box.tensor]
            for first, rectangle in rows.rectangles(range(box.start, box.start + box.count)):
                yield Span(rectangle, kind, whole.shape, place + first, whole.experts)


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A file of one layer, known before any of it is written."""

    name: str
    layer: int
    header: bytes
    images: tuple[Image, ...]
    offsets: tuple[int, ...]  # of the images' first pages
    nbytes: int
    tensors: tuple[StoredTensor, ...]


def layer_file(context: Context, layer: int, rank: int | None) -> LayerFile:
    """Lay out the file of what is this rank's to store of it; `rank`: None where others have all.

    Without images there is nothing to write.
    """
    part = "" if rank is None else f"-rank-{rank:04d}"
    name = f"layer-{layer:04d}{part}.safetensors"
    if layer == ADAPTERS:  # of a stage, whose layers are another's in another plan
        name = f"adapters-{min(context.program.layers):04d}{part}.safetensors"
    return laid_out(name, layer, context.kind(layer).name, written_images(context, layer))


def laid_out(name: str, layer: int, kind: str, images: Sequence[Image]) -> LayerFile:
    """Lay out a file of these images of a layer of that kind."""
    starts, end = [], 0  # within the data
    entries: dict[str, object] = {}
    for number, image in enumerate(images):
        starts.append(end)
        first, filled = end + image.before, end + image.nbytes
        entries |= _padding(f"{number}.before", end, first)
        for span in image.spans:
            title = _title(full_name(kind, layer, span.rectangle.parameter), span)
            entries[title] = _entry(span, first)
        for part in image.filling:
            between = (first + at * ELEMENT for at in (part.start, part.stop))
            entries |= _padding(f"{number}.{part.start}", *between)
        end = align_up(filled, PAGE)
        entries |= _padding(f"{number}.after", filled, end)
    header = _header(entries)
    offsets = tuple(len(header) + start for start in starts)
    tensors = tuple(
        _stored(span, offset + image.before)
        for offset, image in zip(offsets, images, strict=True)
        for span in image.spans
    )
    return LayerFile(name, layer, header, tuple(images), offsets, len(header) + end, tensors)


def _stored(span: Span, offset: int) -> StoredTensor:
    rectangle = span.rectangle
    return StoredTensor(
        parameter=rectangle.parameter,
        kind=span.kind,
        shape=span.shape,
        experts=span.experts,
        first_row=rectangle.first_row,
        last_row=rectangle.last_row,
        first_column=rectangle.first_column,
        last_column=rectangle.last_column,
        offset=offset + span.start * ELEMENT,
    )


def _title(name: str, span: Span) -> str:
    """Name, kind, and rows and columns as an index of the whole parameter."""
    found = span.rectangle
    columns = f"{found.first_column}:{found.last_column}"
    index = columns if len(span.shape) == 1 else f"{found.first_row}:{found.last_row},{columns}"
    return f"{name}/{span.kind}/{index}"


def _entry(span: Span, start: int) -> dict[str, object]:
    shape: tuple[int, ...] = (span.rectangle.rows, span.rectangle.columns)
    if len(span.shape) == 1:
        shape = (span.rectangle.columns,)
    return _described("F32", shape, (start + span.start * ELEMENT, start + span.stop * ELEMENT))


def _padding(name: str, start: int, stop: int) -> dict[str, object]:
    if start == stop:
        return {}
    return {f"padding.{name}": _described("U8", (stop - start,), (start, stop))}


def _described(dtype: str, shape: tuple[int, ...], at: tuple[int, int]) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at)}


def _header(entries: dict[str, object]) -> bytes:
    text = json.dumps({"__metadata__": {"format": "bigplan"}, **entries}, separators=(",", ":"))
    data = text.encode()
    length = align_up(8 + len(data), PAGE) - 8
    return length.to_bytes(8, "little") + data.ljust(length)
