"""One checkpoint being written, action by action; `commit` makes it one.

Ranks that hold the same state share the layers. If ZeRO or tensor parallelism splits the state,
each rank writes its own part of a layer; ranks of several zero groups that have the same part share
the layers, too. A failure (a full disk, a folder that is gone) fails the
checkpoint and not the training: the error is noted, the rest is not written, and the caller is
told.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from bigplan.errors import CheckpointError
from bigplan.graph.strategy import Strategy
from bigplan.mechanics import DISK_THREADS, PAGE, STAGING
from bigplan.placement import Tier
from bigplan.program import Action
from bigplan.ranks import Coordinates
from bigplan.runtime.checkpoint.copies import merged
from bigplan.runtime.checkpoint.folder import PARTIAL, checkpoint_path, publish, remove_partial
from bigplan.runtime.checkpoint.layout import Image, LayerFile, layer_file
from bigplan.runtime.checkpoint.writing import FileWriter, Written, wait_for
from bigplan.runtime.context import Context
from bigplan.runtime.manifest import Extent, Manifest, StoredFile, write_manifest
from bigplan.runtime.memory.buffers import Key
from bigplan.runtime.memory.slab import align_up, aligned_empty
from bigplan.runtime.result import Saved

STAGES = tuple(("stage.c", entry) for entry in range(STAGING))


class Saver:
    """Writes this rank's share of a checkpoint of the state after `manifest.step` steps."""

    def __init__(self, context: Context, folder: Path, manifest: Manifest) -> None:
        self._context, self._manifest = context, manifest
        self.path = checkpoint_path(folder, manifest.step)
        self._partial = self.path.with_name(self.path.name + PARTIAL)
        self._started = time.perf_counter()
        alone = {layer for layer in context.trained if _is_own(context, layer)}
        others = [layer for layer in context.trained if layer not in alone]
        self._files = _own(context, alone) | _share(context, others)
        self._left = {layer: {i.key for i in file.images} for layer, file in self._files.items()}
        self._open: dict[int, tuple[FileWriter, list[Extent]]] = {}
        self._pool = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="checkpoint")
        self._stream: torch.cuda.Stream | None = None
        self.error = ""
        self.stored: list[StoredFile] = []

    def prepare(self) -> None:
        """Make the folder, on the first rank that sees it, before any rank writes."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_partial(folder)
            self._partial.mkdir()
        except OSError as error:
            self._fail(error)

    @property
    def ended(self) -> bool:
        """Whether this rank's share is on the medium, or has failed."""
        return bool(self.error) or len(self.stored) == len(self._files)

    def write(self, action: Action) -> None:
        """Write what the action reads, if it is this rank's; runs on the checkpoint's lane."""
        if self.error or action.layer not in self._files:
            return
        try:
            self._write(action.layer, self._context.entries.key(action.reads[0], action))
        except OSError as error:
            self._fail(error)

    def _write(self, layer: int, key: Key) -> None:
        file = self._files[layer]
        if key not in self._left[layer]:  # nothing there is this rank's to store
            return
        if layer not in self._open:
            self._open[layer] = self._create(file)
        writer, extents = self._open[layer]
        for image, offset in zip(file.images, file.offsets, strict=True):
            if image.key == key:
                sums = tuple(self._image(writer, image, offset))
                extents.append(Extent(offset=offset, nbytes=image.nbytes, checksums=sums))
        self._left[layer].discard(key)
        if not self._left[layer]:
            self._close(file)

    def _create(self, file: LayerFile) -> tuple[FileWriter, list[Extent]]:
        writer = FileWriter(self._partial / file.name, file.nbytes, self._pool)
        header = aligned_empty(len(file.header))
        header.numpy().data[:] = file.header
        sums = tuple(wait_for(writer.write(0, header, len(file.header))))
        return writer, [Extent(offset=0, nbytes=len(file.header), checksums=sums)]

    def _image(self, writer: FileWriter, image: Image, offset: int) -> list[int]:
        """Write an image's pages: from the slab as they are, or stage by stage, two at a time."""
        memory, key = self._context.memory, image.key
        if self._context.program.buffers[key[0]].tier is Tier.HOST:
            pages = memory.place(key)[image.first_page :]
            return list(wait_for(writer.write(offset, pages, image.nbytes)))
        under_way: list[Written] = []
        sums: list[int] = []
        size = memory.place(STAGES[0]).numel()
        for number, start in enumerate(range(0, image.nbytes, size)):
            if len(under_way) == len(STAGES):
                sums += wait_for(under_way.pop(0))
            stage = memory.place(STAGES[number % len(STAGES)])
            nbytes = min(size, image.nbytes - start)
            self._fill(stage[: align_up(nbytes, PAGE)], key, image.first_page + start, nbytes)
            under_way.append(writer.write(offset + start, stage, nbytes))
        for written in under_way:
            sums += wait_for(written)
        return sums

    def _fill(self, stage: Tensor, key: Key, start: int, nbytes: int) -> None:
        memory = self._context.memory
        if memory.on_disk(key):
            memory.read(key, stage, start)
            return
        source = memory.place(key)[start : start + nbytes]
        if not source.is_cuda:
            stage[:nbytes].copy_(source)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            stage[:nbytes].copy_(source, non_blocking=True)
        self._stream.synchronize()

    def _close(self, file: LayerFile) -> None:
        writer, extents = self._open.pop(file.layer)
        apart = self._context.groups.apart
        writer.finish()
        self.stored.append(
            StoredFile(
                name=file.name,
                layer=file.layer,
                nbytes=file.nbytes,
                extents=tuple(sorted(extents, key=lambda extent: extent.offset)),
                tensors=file.tensors,
                places=(apart.place,) if apart else (),
            )
        )

    def _fail(self, error: OSError) -> None:
        self.error = self.error or str(error)

    def seal(self, files: Iterable[StoredFile]) -> str:
        """Write down what all ranks wrote, on the first rank of a folder; what failed, if it did.

        From here on a new name makes it a checkpoint.
        """
        try:
            self._manifest = self._manifest.model_copy(update={"files": merged(files)})
            write_manifest(self._partial, self._manifest)
        except (OSError, CheckpointError) as failure:
            return str(failure)
        return ""

    def commit(self, error: str) -> Saved:
        """Name it, on the first rank of a folder; `error`: what failed on any rank."""
        manifest = self._manifest
        try:
            if not error:
                publish(self._partial, self.path)
        except OSError as failure:
            error = str(failure)
        self.close()
        seconds = time.perf_counter() - self._started
        return Saved(manifest.step, self.path, manifest.nbytes, seconds, error)

    def close(self) -> None:
        """Stop; on the first rank of a folder what is not a checkpoint goes."""
        self._pool.shutdown()  # before the files that its threads write to
        for writer, _ in self._open.values():
            writer.abandon()
        self._open.clear()
        if self._context.groups.first_here:
            shutil.rmtree(self._partial, ignore_errors=True)


def _is_own(context: Context, layer: int) -> bool:
    """Whether no other rank would store the same of the layer."""
    sharers, shards = context.entries.sharers(layer), context.graph.strategy.shards
    return 1 < sharers == shards or (sharers == 1 and context.kind(layer).ep > 1)


def _own(context: Context, layers: Iterable[int]) -> dict[int, LayerFile]:
    """A file of each of the layers of which this rank has something to store."""
    rank = context.groups.at.rank(context.graph.strategy)
    files = (layer_file(context, layer, rank) for layer in layers)
    return {file.layer: file for file in files if file.images}


def _share(context: Context, layers: Sequence[int]) -> dict[int, LayerFile]:
    """The files that this rank writes: layers dealt out, the largest first, to whom has least.

    Where machines share no folder, each place keeps all that its ranks hold.
    """
    strategy, at, apart = context.graph.strategy, context.groups.at, context.groups.apart
    sharers = max((context.entries.sharers(layer) for layer in layers), default=1)
    alike = range(at.data % sharers, strategy.shards, sharers)
    split = strategy.tp > 1 or sharers > 1
    number = _written_by(at, strategy, alike) if split else None
    files = [layer_file(context, layer, number) for layer in layers]
    peers = [at.data] if apart else list(alike)
    for rank in apart.ranks if apart else ():
        other = Coordinates.of(rank, strategy)
        if other != at and other._replace(data=at.data) == at and other.data in alike:
            peers.append(other.data)
    loads, mine = dict.fromkeys(sorted(peers), 0), {}
    for file in sorted(files, key=lambda file: (-file.nbytes, file.layer)):
        writer = min(loads, key=lambda peer: (loads[peer], peer))
        loads[writer] += file.nbytes
        if writer == at.data and file.images:
            mine[file.layer] = file
    return mine


def _written_by(at: Coordinates, strategy: Strategy, alike: Sequence[int]) -> int:
    """The rank that a file is named after: of those with the same state the first."""
    return at._replace(data=alike[0]).rank(strategy)
