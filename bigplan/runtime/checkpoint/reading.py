"""Rows out of a checkpoint, whatever plan wrote it: only the blocks asked for, each one checked."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bigplan.errors import CheckpointError
from bigplan.runtime.checkpoint.layout import ELEMENT, Span
from bigplan.runtime.checkpoint.manifest import Extent, Kind, Manifest, StoredFile, StoredTensor
from bigplan.runtime.checkpoint.writing import BLOCK, THREADS
from bigplan.runtime.disk import CHUNK, PAGE, Pages, TransferError, aligned_empty
from bigplan.runtime.slab import align_up

Stored = tuple[StoredFile, StoredTensor]


@dataclass(frozen=True, slots=True)
class _Run:
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


class Reader:
    """Reads the checkpoint at `path` through `buffer`, page-aligned host memory of a block or more.

    Raises CheckpointError where a file is gone or has other bytes than were written.
    """

    def __init__(self, path: Path, manifest: Manifest, buffer: Tensor | None = None) -> None:
        usable = buffer is not None and buffer.numel() >= BLOCK
        self._buffer = buffer if buffer is not None and usable else aligned_empty(BLOCK)
        self._path, self.manifest = path, manifest
        self._index: dict[tuple[int, str, Kind], list[Stored]] = defaultdict(list)
        for file in manifest.files:
            for tensor in file.tensors:
                self._index[file.layer, tensor.parameter, tensor.kind].append((file, tensor))
        self._pages: Pages | None = None
        self._run: _Run | None = None
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint")

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

    def parameter(self, layer: int, name: str) -> Tensor:
        """A parameter's newest values, fp32, in its shape."""
        master: Kind = "master"
        kind = master if (layer, name, master) in self._index else "weights"
        stored = self._index[layer, name, kind]
        if not stored:
            raise self._lacks(layer, name, kind, 0)
        tensor = stored[0][1]
        elements = torch.Size(tensor.shape).numel()
        values = torch.empty(elements)
        whole = Span(name, kind, tensor.shape, 0, tensor.columns, 0, elements)
        self.read(layer, whole, values)
        return values.view(tensor.shape)

    def read(self, layer: int, span: Span, into: Tensor) -> None:
        """The rows of `span` into flat memory of any device and float type."""
        row = span.first_row
        for file, tensor in sorted(
            self._index[layer, span.parameter, span.kind], key=lambda stored: stored[1].first
        ):
            if tensor.first <= row < min(tensor.last, span.last_row):
                last = min(tensor.last, span.last_row)
                low, high = (
                    tensor.offset + (r - tensor.first) * tensor.columns * ELEMENT
                    for r in (row, last)
                )
                done = (row - span.first_row) * span.columns
                for values in self._values(file, low, high):
                    into[done : done + values.numel()].copy_(values)
                    done += values.numel()
                row = last
        if row < span.last_row:
            raise self._lacks(layer, span.parameter, span.kind, row)

    def _lacks(self, layer: int, name: str, kind: Kind, row: int) -> CheckpointError:
        return CheckpointError(
            f"{self._path} lacks {kind} of {name} in layer {layer} from row {row} on: the "
            "checkpoint is damaged; resume from another one"
        )

    def _values(self, file: StoredFile, low: int, high: int) -> Iterator[Tensor]:
        """The fp32 values from byte `low` up to `high` of a file, as many at once as fit."""
        extent = file.extents[bisect_right([e.offset for e in file.extents], low) - 1]
        room = self._buffer.numel() // BLOCK
        while low < high:
            block = (low - extent.offset) // BLOCK
            held = self._run
            if held is None or held.name != file.name or not held.start <= low < held.stop:
                last = min(-(-(high - extent.offset) // BLOCK), block + room)
                held = self._fetch(_Run(file.name, extent, block, last))
            stop = min(high, held.stop)
            yield self._buffer[low - held.start : stop - held.start].view(torch.float32)
            low = stop

    def _fetch(self, run: _Run) -> _Run:
        """Read and check blocks into the buffer."""
        self._run = None
        path = self._path / run.name
        try:
            if self._pages is None or self._pages.path != path:
                if self._pages is not None:
                    self._pages.close()
                    self._pages = None
                self._pages = Pages.open(path)
            parts = range(run.start, run.stop, CHUNK)
            view = self._buffer.numpy().data
            list(self._pool.map(lambda at: self._chunk(run, at, view), parts))
        except (TransferError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): resume from another checkpoint"
            ) from error
        self._run = run
        return run

    def _chunk(self, run: _Run, at: int, view: memoryview) -> None:
        assert self._pages is not None
        nbytes = min(CHUNK, run.stop - at)
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
