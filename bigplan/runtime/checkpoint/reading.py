"""Rectangles out of a checkpoint, whatever plan wrote it: only their blocks, each one checked."""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bigplan.errors import CheckpointError
from bigplan.mechanics import DISK_THREADS, PAGE, TRANSFER_BYTES
from bigplan.rectangle import Rectangle, cut, whole
from bigplan.runtime.manifest import (
    BLOCK,
    ELEMENT,
    Dtype,
    Extent,
    Kind,
    Manifest,
    StoredFile,
    StoredTensor,
)
from bigplan.runtime.memory.disk import Pages, TransferError
from bigplan.runtime.memory.moments import decoded, of_elements
from bigplan.runtime.memory.slab import align_up, aligned_empty
from bigplan.spec.moments import BLOCK as MOMENT_BLOCK

if TYPE_CHECKING:
    from bigplan.runtime.parallel.apart import Bring


_TYPES: Mapping[Dtype, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class _StoredRectangle:
    """A stored rectangle and its place."""

    rectangle: Rectangle
    file: StoredFile
    tensor: StoredTensor


class _Index:
    """What is stored of one parameter in one kind."""

    def __init__(self, stored: Iterable[_StoredRectangle]) -> None:
        self._stored = sorted(
            stored, key=lambda one: (one.rectangle.first_row, one.rectangle.first_column)
        )
        self._first = [one.rectangle.first_row for one in self._stored]
        # The greatest of those so far: bisection finds the first that goes beyond some row.
        self._last = list(accumulate((one.rectangle.last_row for one in self._stored), max))

    @property
    def any(self) -> StoredTensor:
        """One of the parts, which has the shape of the whole parameter."""
        return self._stored[0].tensor

    def near(self, wanted: Rectangle) -> Iterator[_StoredRectangle]:
        """What may share elements with it, from the first row on."""
        first = bisect_right(self._last, wanted.first_row)
        yield from self._stored[first : bisect_left(self._first, wanted.last_row)]


@dataclass(frozen=True, slots=True)
class _BlockRange:
    """Blocks `first` up to `last` of an extent, which the buffer holds."""

    name: str
    extent: Extent
    first: int
    last: int

    @property
    def start(self) -> int:
        """The first byte, within the file."""
        return self.extent.offset + self.first * BLOCK

    @property
    def stop(self) -> int:
        """The byte after the last, within the file."""
        return self.extent.offset + min(self.last * BLOCK, self.extent.nbytes)


def side_by_side(tensor: StoredTensor, experts: int) -> tuple[StoredTensor, ...]:
    """An older part of all experts' parameter, whose rows take turns, in rows of all experts.

    Such a part is a range of elements: whole rows, or some of one row.
    """
    _, columns = tensor.matrix
    assert tensor.last_row == tensor.first_row + 1 or tensor.rectangle.columns == columns, tensor
    first = tensor.first_row * columns + tensor.first_column
    wide = cut(tensor.parameter, experts * columns, first, first + tensor.rectangle.elements)
    found, offset = [], tensor.offset
    for part in wide:
        place = {
            "first_row": part.first_row,
            "last_row": part.last_row,
            "first_column": part.first_column,
            "last_column": part.last_column,
            "offset": offset,
            "experts": experts,
        }
        found.append(tensor.model_copy(update=place))
        offset += part.elements * tensor.size
    return tuple(found)


class Reader:
    """Reads the checkpoint at `path` through `buffer`, page-aligned host memory of a block or more.

    `bring` puts a file there that another place has. Raises CheckpointError where a file is gone or
    has other bytes than were written.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        buffer: Tensor | None = None,
        bring: Bring | None = None,
    ) -> None:
        usable = buffer is not None and buffer.numel() >= BLOCK
        self._buffer = buffer if buffer is not None and usable else aligned_empty(BLOCK)
        self._path, self.manifest, self._bring = path, manifest, bring
        found: dict[tuple[int, str, Kind], list[_StoredRectangle]] = defaultdict(list)
        kinds = manifest.model.kinds().values()
        of_experts = {p.name: p.experts for kind in kinds for p in kind if p.experts}
        for file in manifest.files:
            for tensor in file.tensors:
                experts = of_experts.get(tensor.parameter, tensor.experts)
                parts = side_by_side(tensor, experts) if experts != tensor.experts else (tensor,)
                found[file.layer, tensor.parameter, tensor.kind] += (
                    _StoredRectangle(one.rectangle, file, one) for one in parts
                )
        self._index = {key: _Index(stored) for key, stored in found.items()}
        self._pages: Pages | None = None
        self._run: _BlockRange | None = None
        self._scales: tuple[_StoredRectangle, Tensor] | None = None
        self._pool = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="checkpoint")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file that is open. May be called again."""
        self._pool.shutdown()
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    @property
    def has_roots(self) -> bool:
        """Whether second moments are stored by their roots, which `read` gives."""
        return self.manifest.training.optimizer.moments == "int8"

    def parameter(self, layer: int, name: str) -> Tensor:
        """A parameter's newest values, fp32, in its shape."""
        kinds: tuple[Kind, ...] = ("master", "weights")
        for kind in kinds:
            if (layer, name, kind) in self._index:
                stored = self._index[layer, name, kind].any
                values = torch.empty(stored.shape)
                self.read(layer, kind, whole(name, *stored.matrix), values.view(-1))
                return values
        raise self._lacks(layer, kinds[-1], f"all of {name}")

    def read(self, layer: int, kind: Kind, wanted: Rectangle, into: Tensor) -> None:
        """A rectangle's values, row by row, into flat memory of any device and float type."""
        matrix = into.view(wanted.rows, wanted.columns)
        missing = [wanted]
        index = self._index.get((layer, wanted.parameter, kind))
        for stored in index.near(wanted) if index is not None else ():
            # Where stored rectangles overlap, the first that has an element gives it.
            found = [part for one in missing if (part := one.shared(stored.rectangle))]
            for part in found:
                self._copy(stored, part, matrix[part.within(wanted)])
            if found:
                missing = [part for one in missing for part in one.without(stored.rectangle)]
        if missing:
            first = min(missing, key=lambda part: (part.first_row, part.first_column))
            raise self._lacks(
                layer,
                kind,
                f"{sum(part.elements for part in missing)} elements of {wanted.parameter}, the "
                f"first in row {first.first_row}, column {first.first_column}",
            )

    def _lacks(self, layer: int, kind: Kind, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} lacks {kind} of layer {layer}: {what}; the checkpoint is damaged: "
            "resume from another one"
        )

    def _copy(self, stored: _StoredRectangle, wanted: Rectangle, into: Tensor) -> None:
        """A part of a stored rectangle into a matrix of its size."""
        origin = stored.rectangle
        if (origin.columns - wanted.columns) * stored.tensor.size < BLOCK or wanted.rows == 1:
            self._stream(stored, wanted, into)
            return
        for row in range(wanted.first_row, wanted.last_row):  # there are blocks without any of it
            columns = wanted.first_column, wanted.last_column
            part = Rectangle(wanted.parameter, row, row + 1, *columns)
            self._stream(stored, part, into[part.within(wanted)])

    def _stream(self, stored: _StoredRectangle, wanted: Rectangle, into: Tensor) -> None:
        """The same, through all stored bytes from the part's first to its last.

        What the buffer holds of them is a range of elements, so at most three rectangles. One copy
        does for each, however many rows it has and however narrow they are.
        """
        origin = stored.rectangle
        rows, columns = wanted.within(origin)
        element = rows.start * origin.columns + columns.start
        last = (rows.stop - 1) * origin.columns + columns.stop
        for values in self._elements(stored, range(element, last)):
            stop = element + values.numel()
            parts = list(cut(wanted.parameter, origin.columns, element, stop))
            sizes = [part.elements for part in parts]
            for part, flat in zip(parts, torch.split(values, sizes), strict=True):
                held = part.moved(origin.first_row, origin.first_column)
                shared = held.shared(wanted)
                if shared is not None:
                    matrix = flat.view(held.rows, held.columns)
                    into[shared.within(wanted)].copy_(matrix[shared.within(held)])
            element = stop

    def _elements(self, stored: _StoredRectangle, wanted: range) -> Iterator[Tensor]:
        """Elements of a stored rectangle, as many at once as fit: in fp32, or bf16 as stored."""
        tensor, scaled, start = stored.tensor, stored.tensor.scaled, wanted.start
        scales = None if scaled is None else self._scales_of(stored)
        low, high = (tensor.offset + at * tensor.size for at in (start, wanted.stop))
        for values in self._values(stored.file, low, high, _TYPES[tensor.dtype]):
            if scaled is None or scales is None:
                yield values
                continue
            place, stop = scaled.place + start, scaled.place + start + len(values)
            blocks = scales[place // MOMENT_BLOCK : -(-stop // MOMENT_BLOCK)]
            within = place % MOMENT_BLOCK
            each = of_elements(blocks, within + len(values))[within:]
            yield decoded(values, each)
            start += len(values)

    def _scales_of(self, stored: _StoredRectangle) -> Tensor:
        """The scales of its blocks. Those of the last one asked for are kept: rows come in turn."""
        if self._scales is None or self._scales[0] is not stored:
            scaled, count = stored.tensor.scaled, stored.rectangle.elements
            assert scaled is not None, stored
            low = scaled.offset
            high = low + ELEMENT * -(-(scaled.place + count) // MOMENT_BLOCK)
            found = [one.clone() for one in self._values(stored.file, low, high, torch.float32)]
            self._scales = stored, torch.cat(found)
        return self._scales[1]

    def _values(
        self, file: StoredFile, low: int, high: int, dtype: torch.dtype
    ) -> Iterator[Tensor]:
        """The values from byte `low` up to `high` of a file, as many at once as fit."""
        extent = file.extents[bisect_right([e.offset for e in file.extents], low) - 1]
        room = self._buffer.numel() // BLOCK
        while low < high:
            block = (low - extent.offset) // BLOCK
            held = self._run
            if held is None or held.name != file.name or not held.start <= low < held.stop:
                last = min(-(-(high - extent.offset) // BLOCK), block + room)
                held = self._fetch(_BlockRange(file.name, extent, block, last), file)
            stop = min(high, held.stop)
            yield self._buffer[low - held.start : stop - held.start].view(dtype)
            low = stop

    def _fetch(self, run: _BlockRange, file: StoredFile) -> _BlockRange:
        """Read and check blocks into the buffer."""
        self._run = None
        path = self._path / run.name
        try:
            if self._pages is None or self._pages.path != path:
                if self._pages is not None:
                    self._pages.close()
                    self._pages = None
                if self._bring is not None and not path.exists():
                    self._bring(path, file)
                self._pages = Pages.open(path)
            parts = range(run.start, run.stop, TRANSFER_BYTES)
            view = self._buffer.numpy().data
            list(self._pool.map(lambda at: self._chunk(run, at, view), parts))
        except (TransferError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): resume from another checkpoint"
            ) from error
        self._run = run
        return run

    def _chunk(self, run: _BlockRange, at: int, view: memoryview) -> None:
        assert self._pages is not None
        nbytes = min(TRANSFER_BYTES, run.stop - at)
        start = at - run.start
        part = view[start : start + nbytes]
        self._pages.move(at, view[start : start + align_up(nbytes, PAGE)], write=False)
        for number, low in enumerate(range(0, nbytes, BLOCK), start=run.first + start // BLOCK):
            if zlib.crc32(part[low : low + BLOCK]) != run.extent.checksums[number]:
                raise CheckpointError(
                    f"{self._path / run.name}: bytes from {at + low} on are not those that were "
                    "written (their CRC-32 differs): the checkpoint is damaged; resume from "
                    "another one"
                )
        self._pages.forget(at, nbytes)
