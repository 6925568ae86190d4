"""Which bytes of a rank's buffers are a layer's state, and how a layer's file is laid out.

    8 bytes: length of the header; the header, JSON, padded with spaces to a whole page;
    then image after image, each at a whole page and filled up to one

An image is a buffer entry as it is in memory: the moments (and master copy) of a piece one after
the other, or fp32 parameters. So a piece in host memory is written from where it is, with O_DIRECT,
and is still a valid safetensors file. That format allows no gaps; what fills up is a tensor too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bigplan.runtime.checkpoint.manifest import Kind, StoredTensor
from bigplan.runtime.context import Context
from bigplan.runtime.memory import Key
from bigplan.runtime.pieces import Box
from bigplan.runtime.slab import PAGE, align_up
from bigplan.spec.optimizer import full_name

ELEMENT = 4  # bytes: all state is fp32
_MOMENTS: Mapping[str, tuple[Kind, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum",),
}


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one parameter in an image: `count` elements of one kind from element `start` on."""

    parameter: str
    kind: Kind
    shape: tuple[int, ...]
    first_row: int
    columns: int
    start: int
    count: int

    @property
    def last_row(self) -> int:
        """The row after its last."""
        return self.first_row + self.count // self.columns


@dataclass(frozen=True, slots=True)
class Image:
    """A buffer entry with state in it."""

    key: Key
    spans: tuple[Span, ...]

    @property
    def elements(self) -> int:
        """Of all spans, which lie one after the other."""
        return sum(span.count for span in self.spans)

    @property
    def nbytes(self) -> int:
        """What is stored of it."""
        return self.elements * ELEMENT


def state_kinds(context: Context) -> tuple[Kind, ...]:
    """What an optimizer state buffer holds, in its order."""
    optimizer = context.training.optimizer
    names = _MOMENTS[optimizer.name]
    master: tuple[Kind, ...] = ("master",) if context.graph.sizes.master else ()
    kinds = (*names[: optimizer.moments], *master)
    assert context.graph.sizes.state == ELEMENT * len(kinds), (context.graph.sizes, kinds)
    return kinds


def layer_images(context: Context, layer: int) -> tuple[Image, ...]:
    """All state of a layer: its pieces and, where no piece has a master copy, its parameters."""
    rows, images = context.rows[layer], []
    if not context.graph.sizes.master:
        images.append(parameter_image(context, layer, "weights"))
    kinds = state_kinds(context)
    for share, chunk, boxes in rows.state:
        spans = tuple(_spans(context, layer, boxes, kinds))
        if spans:
            images.append(Image((f"o{layer}.{share}", chunk), spans))
    return tuple(images)


def parameter_image(context: Context, layer: int, kind: Kind) -> Image:
    """A layer's parameters, all rows, as they are filled in from what is stored as `kind`."""
    offsets = context.rows[layer].offsets.items()
    boxes = [Box(name, start, rows * columns, start) for name, (start, rows, columns) in offsets]
    return Image((f"w{layer}", 0), tuple(_spans(context, layer, boxes, (kind,))))


def _spans(
    context: Context, layer: int, boxes: Sequence[Box], kinds: Sequence[Kind]
) -> Iterator[Span]:
    shapes = {parameter.name: parameter.shape for parameter in context.parameters(layer)}
    elements = sum(box.count for box in boxes)
    for number, kind in enumerate(kinds):
        for box in boxes:
            start, _, columns = context.rows[layer].offsets[box.tensor]
            yield Span(
                box.tensor,
                kind,
                shapes[box.tensor],
                (box.start - start) // columns,
                columns,
                number * elements + box.place,
                box.count,
            )


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A layer's file, known before any of it is written."""

    name: str
    layer: int
    header: bytes
    images: tuple[Image, ...]
    offsets: tuple[int, ...]  # of the images
    nbytes: int
    tensors: tuple[StoredTensor, ...]


def layer_file(context: Context, layer: int) -> LayerFile:
    """Lay out the layer's file."""
    images = layer_images(context, layer)
    kind = context.graph.layers[layer]
    starts, end = [], 0  # within the data
    entries: dict[str, object] = {}
    for number, image in enumerate(images):
        starts.append(end)
        for span in image.spans:
            entries[_title(full_name(kind, layer, span.parameter), span)] = _entry(span, end)
        filled, end = end + image.nbytes, align_up(end + image.nbytes, PAGE)
        if end > filled:
            entries[f"padding.{number}"] = _described("U8", (end - filled,), (filled, end))
    header = _header(entries)
    tensors = tuple(
        StoredTensor(
            parameter=span.parameter,
            kind=span.kind,
            shape=span.shape,
            first=span.first_row,
            last=span.last_row,
            columns=span.columns,
            offset=len(header) + start + span.start * ELEMENT,
        )
        for start, image in zip(starts, images, strict=True)
        for span in image.spans
    )
    offsets = tuple(len(header) + start for start in starts)
    name = f"layer-{layer:04d}.safetensors"
    return LayerFile(name, layer, header, images, offsets, len(header) + end, tensors)


def _title(name: str, span: Span) -> str:
    return f"{name}/{span.kind}/{span.first_row}:{span.last_row}"


def _entry(span: Span, start: int) -> dict[str, object]:
    shape = (span.last_row - span.first_row, *span.shape[1:])
    if len(span.shape) == 1:
        shape = span.shape
    low = start + span.start * ELEMENT
    return _described("F32", shape, (low, low + span.count * ELEMENT))


def _described(dtype: str, shape: tuple[int, ...], at: tuple[int, int]) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at)}


def _header(entries: dict[str, object]) -> bytes:
    text = json.dumps({"__metadata__": {"format": "bigplan"}, **entries}, separators=(",", ":"))
    data = text.encode()
    length = align_up(8 + len(data), PAGE) - 8
    return length.to_bytes(8, "little") + data.ljust(length)
