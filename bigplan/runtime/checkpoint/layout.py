"""Which bytes of a rank's buffers are a layer's state, and how a file of it is laid out.

    8 bytes: length of the header; the header, JSON, padded with spaces to a whole page;
    then image after image: the pages of a buffer entry that have state in them

An image is a buffer entry as it is in memory: the moments of a piece and its master copy, as
spec/moments.py has them, or fp32 parameters. So a piece in host memory is written from its place,
with O_DIRECT, and the file is still a valid safetensors file. That format allows no gaps, so
filling is a tensor, too, and so are the scales of moments in 8 bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from typing import NamedTuple

from bigplan.content import ADAPTERS, Content, Holds
from bigplan.mechanics import PAGE
from bigplan.rectangle import Rectangle
from bigplan.runtime.context import Context
from bigplan.runtime.manifest import ELEMENT, SIZES, Dtype, Kind, Scaled, StoredTensor
from bigplan.runtime.memory.buffers import Key
from bigplan.runtime.memory.pieces import Box, LayerRows, packed
from bigplan.runtime.memory.slab import align_up
from bigplan.spec.moments import BLOCK as MOMENT_BLOCK
from bigplan.spec.moments import Moments, places
from bigplan.spec.optimizer import full_name

_MOMENTS: Mapping[str, tuple[Kind, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum",),
    "muon": ("momentum", "exp_avg", "exp_avg_sq"),
}
_DTYPES: Mapping[Moments, tuple[Dtype, Dtype]] = {
    "fp32": ("F32", "F32"),
    "bf16": ("BF16", "BF16"),
    "int8": ("I8", "U8"),
}


@dataclass(frozen=True, slots=True)
class Span:
    """A rectangle of one kind in an image, row by row from element `start` of the image on.

    The image is counted in elements of the span's size. Of 8 bits, `scaled` says where in the
    image, in bytes, scales are, and where in their piece its elements.
    """

    rectangle: Rectangle
    kind: Kind
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    experts: int = 0  # as Parameter has it
    dtype: Dtype = "F32"
    scaled: Scaled | None = None

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return SIZES[self.dtype]

    @property
    def filled(self) -> range:
        """Its bytes of the image."""
        return range(self.start * self.size, self.stop * self.size)

    @property
    def stop(self) -> int:
        """The element after its last."""
        return self.start + self.rectangle.elements


@dataclass(frozen=True, slots=True)
class Image:
    """State in a buffer entry, from byte `offset` of the entry on, its spans in order.

    Files and transfers have the entry's whole pages, so up to a page before the image is stored,
    too. Bytes in no span are filling, and zero in memory, or scales. `length`: its bytes.
    """

    key: Key
    spans: tuple[Span, ...]
    length: int
    offset: int = 0

    @property
    def filling(self) -> Iterator[range]:
        """The image's bytes that are in no span."""
        start = 0
        for filled in sorted((span.filled for span in self.spans), key=lambda one: one.start):
            if start < filled.start:
                yield range(start, filled.start)
            start = filled.stop
        if start < self.length:
            yield range(start, self.length)

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
        return self.before + self.length


def state_kinds(context: Context) -> tuple[Kind, ...]:
    """What an optimizer state buffer holds, in its order."""
    optimizer = context.training.optimizer
    names = _MOMENTS[optimizer.name]
    master: tuple[Kind, ...] = ("master",) if context.graph.sizes.master else ()
    return (*(names if optimizer.seconds else names[: optimizer.kept]), *master)


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
    return (*(image for image in parameters if image.spans), *images)


def _to_store(rows: LayerRows, image: Image) -> Iterator[Image]:
    """The image where all of it is this rank's to store, else one of what is of every kind."""
    mine = [span for span in image.spans if rows.part.stores(rows.element(span.rectangle))]
    if mine and len(mine) == len(image.spans):
        yield image
        return
    if any(span.scaled for span in mine):  # which all blocks need
        yield replace(image, spans=tuple(mine))
        return
    for _, alike in groupby(mine, key=lambda span: span.kind):
        spans = tuple(alike)
        first = spans[0].start
        spans = tuple(replace(span, start=span.start - first) for span in spans)
        offset = image.offset + first * spans[0].size
        yield Image(image.key, spans, spans[-1].filled.stop, offset)


def state_images(context: Context, layer: int) -> tuple[Image, ...]:
    """The layer's optimizer state on this rank, piece by piece."""
    images, kinds = [], state_kinds(context)
    for share, chunk, boxes in context.rows[layer].state:
        if boxes and kinds:
            elements = sum(box.count for box in boxes)
            if context.training.optimizer.name == "muon":
                spans = tuple(_muon_spans(context, layer, boxes))
            else:
                parts = _parts(context, kinds, elements)
                spans = tuple(_spans(context, layer, boxes, parts))
            home = context.entries.home(Content(Holds.STATE, layer, share, chunk))
            nbytes = context.state_bytes(layer, elements)
            images.append(Image(home, spans, nbytes))
    return tuple(images)


def piece_spans(context: Context, layer: int, boxes: Sequence[Box], kind: Kind) -> Iterator[Span]:
    """What a piece of these boxes has of a kind, counted from its first element."""
    return _spans(context, layer, boxes, (_Part(kind, 0),))


class _Part(NamedTuple):
    """Elements of one kind in an image: the byte where they begin, and that of their scales."""

    kind: Kind
    start: int
    dtype: Dtype = "F32"
    scales: int | None = None


def _parts(context: Context, kinds: Sequence[Kind], elements: int) -> Iterator[_Part]:
    """What an image of so many elements' state is made of, in the order of its kinds."""
    optimizer, master = context.training.optimizer, context.graph.sizes.master
    at = places(elements, optimizer.moments, optimizer.kept, master=master)
    dtypes = _DTYPES[optimizer.moments]
    for kind, start, dtype, scales in zip_longest(kinds, at.moments, dtypes, at.scales):
        if kind == "master":
            yield _Part(kind, at.master)
        elif kind is not None:
            yield _Part(kind, start, dtype, scales)


def _muon_spans(context: Context, layer: int, boxes: Sequence[Box]) -> Iterator[Span]:
    """Momentum of matrices, both moments of what AdamW updates, and the master copy of all."""
    elements, kind = sum(box.count for box in boxes), context.kind(layer)
    by_muon = {tensor.name for tensor in kind.orthogonalised}
    seconds, master = context.graph.second_moments(kind, elements), context.graph.sizes.master
    at = places(elements, "fp32", 1, master=master, seconds=seconds)
    for box in boxes:
        first: Kind = "momentum" if box.tensor in by_muon else "exp_avg"
        yield from _spans(context, layer, (box,), (_Part(first, at.moments[0]),))
    others = tuple(packed(box for box in boxes if box.tensor not in by_muon))
    if others:
        yield from _spans(context, layer, others, (_Part("exp_avg_sq", at.moments[1]),))
    if master:
        yield from _spans(context, layer, boxes, (_Part("master", at.master),))


def parameter_images(
    context: Context, layer: int, kind: Kind, ranges: Sequence[range] | None = None
) -> tuple[Image, ...]:
    """Elements of the layer's parameters in this rank's buffer, all by default, stored as `kind`.

    There is an image for each range, also where all of it is filling. Its offset is for parameters
    of fp32, the only ones that are stored as they are.
    """
    held, home = context.entries.held(layer), context.entries.home(Content(Holds.PARAMETERS, layer))
    found = []
    for wanted in [own for _, own in held] if ranges is None else ranges:
        boxes = tuple(context.rows[layer].boxes_of(wanted))
        if wanted:
            spans = tuple(_spans(context, layer, boxes, (_Part(kind, 0),)))
            place = next(at + wanted.start - own.start for at, own in held if wanted.start in own)
            found.append(Image(home, spans, len(wanted) * ELEMENT, place * ELEMENT))
    return tuple(found)


def _spans(
    context: Context, layer: int, boxes: Sequence[Box], parts: Iterable[_Part]
) -> Iterator[Span]:
    parameters = {parameter.name: parameter for parameter in context.parameters(layer)}
    rows = context.rows[layer]
    for part in parts:
        begin = part.start // SIZES[part.dtype]
        for box in boxes:
            whole = parameters[box.tensor]
            for first, rectangle in rows.rectangles(range(box.start, box.start + box.count)):
                place = box.place - box.start + first  # in the piece
                scaled = None
                if part.scales is not None:
                    block, within = divmod(place, MOMENT_BLOCK)
                    scaled = Scaled(offset=part.scales + ELEMENT * block, place=within)
                yield Span(
                    rectangle,
                    part.kind,
                    whole.shape,
                    begin + place,
                    whole.experts,
                    part.dtype,
                    scaled,
                )


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
    return laid_out(name, layer, context.graph.layers, written_images(context, layer))


def laid_out(name: str, layer: int, layers: Sequence[str], images: Sequence[Image]) -> LayerFile:
    """Lay out a file of these images of a layer of a model with `layers` of these kinds."""
    starts, end = [], 0  # within the data
    entries: dict[str, object] = {}
    for number, image in enumerate(images):
        starts.append(end)
        first, filled = end + image.before, end + image.nbytes
        entries |= _padding(f"{number}.before", end, first)
        for span in image.spans:
            title = _title(full_name(layers, layer, span.rectangle.parameter), span)
            entries[title] = _entry(span, first)
        for part in image.filling:
            entries |= _padding(f"{number}.{part.start}", first + part.start, first + part.stop)
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
    rectangle, scaled = span.rectangle, span.scaled
    if scaled is not None:
        scaled = scaled.model_copy(update={"offset": offset + scaled.offset})
    return StoredTensor(
        parameter=rectangle.parameter,
        kind=span.kind,
        shape=span.shape,
        experts=span.experts,
        first_row=rectangle.first_row,
        last_row=rectangle.last_row,
        first_column=rectangle.first_column,
        last_column=rectangle.last_column,
        offset=offset + span.filled.start,
        dtype=span.dtype,
        scaled=scaled,
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
    filled = span.filled
    return _described(span.dtype, shape, (start + filled.start, start + filled.stop))


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
