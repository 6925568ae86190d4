"""A DeepSpeed engine's state as one of bigplan's checkpoints, which any engine reads and exports.

Parameters are brought together from all ranks, one after the other. Ranks take turns in writing
layers. DeepSpeed's own checkpoints copy the whole swap folder of a drive, and only DeepSpeed on
equally many ranks reads them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from bigplan.errors import CheckpointError
from bigplan.mechanics import DISK_THREADS, PAGE
from bigplan.ranks import Coordinates
from bigplan.rectangle import all_of
from bigplan.runtime.checkpoint.copies import merged
from bigplan.runtime.checkpoint.folder import PARTIAL, checkpoint_path, publish, remove_partial
from bigplan.runtime.checkpoint.layout import Image, LayerFile, Span, laid_out
from bigplan.runtime.checkpoint.writing import FileWriter, wait_for
from bigplan.runtime.deepspeed import state
from bigplan.runtime.deepspeed.model import Described, LayerModule, with_parameters
from bigplan.runtime.manifest import (
    ELEMENT,
    Extent,
    Kind,
    Manifest,
    StoredFile,
    write_manifest,
)
from bigplan.runtime.memory.slab import align_up, aligned_empty
from bigplan.runtime.parallel.apart import Apart
from bigplan.runtime.parallel.groups import Groups
from bigplan.runtime.result import Saved

Share = tuple[str, list[StoredFile]]  # of a rank: what failed, what it has written
_SHARE = TypeAdapter(Share)


def write_checkpoint(
    engine: Any, layers: Iterable[LayerModule], groups: Groups, folder: Path, manifest: Manifest
) -> Saved:
    """Write a checkpoint on all ranks together; Saved.error says on each whether it failed.

    `layers`: those of this rank's stage. `manifest` has everything but the files.
    """
    path, begun = checkpoint_path(folder, manifest.step), time.perf_counter()
    partial = path.with_name(path.name + PARTIAL)
    speaks = groups.first_here
    error, stored = _prepare(folder, partial) if speaks else "", list[StoredFile]()
    state.link_moments(engine)
    groups.all_true(flag=True)  # there is a folder now
    master: Kind = "weights" if manifest.training.precision == "fp32" else "master"
    for layer, parameters in with_parameters(layers):
        mine = _writer(groups, layer) == groups.at.data
        image = _brought_together(engine, layer, parameters, master, keep=mine)
        if image is not None and not error:
            try:
                stored.append(_write(partial, layer, *image, groups.apart))
            except OSError as failure:
                error = str(failure)
    shares = _gathered(groups, (error, stored))
    error, complete = _together(shares), manifest
    if not error:
        try:
            files = merged(file for _, files in shares for file in files)
            complete = manifest.model_copy(update={"files": files})
            if speaks:
                write_manifest(partial, complete)
        except (OSError, CheckpointError) as failure:
            error = str(failure)
        error = _together(_gathered(groups, (error, [])))
    if speaks:
        error = _ended(folder, partial, path, error)
    error = _together(_gathered(groups, (error, [])))
    return Saved(manifest.step, path, complete.nbytes, time.perf_counter() - begun, error)


def _writer(groups: Groups, layer: LayerModule) -> int:
    """Which data-parallel rank of this stage writes the layer, each in turn.

    Where machines share no folder and ranks hold the same state, one of each place does.
    """
    strategy, at, apart = groups.strategy, groups.at, groups.apart
    peers = list(range(strategy.dp))
    if apart is not None and not strategy.zero:
        places = [Coordinates.of(rank, strategy) for rank in apart.ranks]
        peers = [each.data for each in places if each.stage == at.stage]
    return peers[layer.layer % len(peers)]


def _gathered(groups: Groups, share: Share) -> list[Share]:
    texts = groups.texts_of_all(_SHARE.dump_json(share))
    return [_SHARE.validate_json(text) for text in texts]


def _together(shares: Iterable[Share]) -> str:
    """All errors, each once."""
    return "; ".join(dict.fromkeys(failed for failed, _ in shares if failed))


def _prepare(folder: Path, partial: Path) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_partial(folder)
        partial.mkdir()
    except OSError as error:
        return str(error)
    return ""


def _ended(folder: Path, partial: Path, path: Path, error: str) -> str:
    """Give it its name, or its space back where something failed; what failed."""
    try:
        if error:
            remove_partial(folder)
        else:
            publish(partial, path)
    except OSError as failure:
        return error or str(failure)
    return error


def _brought_together(
    engine: Any, layer: LayerModule, described: Described, master: Kind, *, keep: bool
) -> tuple[LayerFile, torch.Tensor] | None:
    """The layer's file and its values, on the rank that keeps it."""
    elements = 3 * sum(parameter.count for parameter, _ in described)
    values = aligned_empty(align_up(elements * ELEMENT, PAGE)) if keep else None
    spans, start = list[Span](), 0
    for wanted in state.KINDS:
        kind = master if wanted == "master" else wanted
        for parameter, tensor in described:
            found = state.get(engine, tensor, wanted)
            spans.append(Span(all_of(parameter), kind, parameter.shape, start, parameter.experts))
            if values is not None:
                place = values[start * ELEMENT : spans[-1].stop * ELEMENT].view(torch.float32)
                place.copy_(found.flatten())
            start = spans[-1].stop
    if values is None:
        return None
    image = Image(("deepspeed", 0), tuple(spans), elements * ELEMENT)
    name = f"layer-{layer.layer:04d}.safetensors"
    return laid_out(name, layer.layer, layer.kinds, (image,)), values


def _write(
    folder: Path, layer: LayerModule, file: LayerFile, values: torch.Tensor, apart: Apart | None
) -> StoredFile:
    header = aligned_empty(len(file.header))
    header.numpy().data[:] = file.header
    with ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="checkpoint") as pool:
        writer = FileWriter(folder / file.name, file.nbytes, pool)
        try:
            extents = []
            for offset, source, nbytes in (
                (0, header, len(file.header)),
                (file.offsets[0], values, file.images[0].nbytes),
            ):
                sums = tuple(wait_for(writer.write(offset, source, nbytes)))
                extents.append(Extent(offset=offset, nbytes=nbytes, checksums=sums))
        except BaseException:
            writer.abandon()
            raise
        writer.finish()
    return StoredFile(
        name=file.name,
        layer=layer.layer,
        nbytes=file.nbytes,
        extents=tuple(extents),
        tensors=file.tensors,
        places=(apart.place,) if apart else (),
    )
