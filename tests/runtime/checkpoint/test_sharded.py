"""Where ZeRO shards the state, every rank writes its part of every layer, and anybody reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("torch")

import torch

from bigplan.mechanics import PAGE
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.program import Op, expand
from bigplan.ranks import Coordinates
from bigplan.runtime.checkpoint import Manifest, Saver, latest, restore
from bigplan.runtime.context import Context
from bigplan.runtime.manifest import ELEMENT
from bigplan.runtime.memory.pieces import Box, LayerRows, OwnedPart, OwnedRange
from bigplan.runtime.worker import NativeWorker
from tests.runtime.checkpoints import away, passing, resident, running
from tests.runtime.harness import context_of, same, state_of

RANKS = 3
Bounds = Mapping[int, tuple[int, ...]]  # of a layer's elements between its ranks


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def _bounds(context: Context, random: Random) -> Bounds:
    """Rows are cut anywhere, and the last rank has nothing of the last layer."""
    found = {}
    for layer in context.program.layers:
        elements = context.kind(layer).parameters
        cuts = sorted(random.randrange(1, elements) for _ in range(RANKS - 1))
        if layer == max(context.program.layers):
            cuts[-1] = elements
        found[layer] = (0, *cuts, elements)
    return found


def _part(rows: LayerRows, low: int, high: int) -> LayerRows:
    """What of every piece and chunk is of these elements."""

    def clipped(boxes: tuple[Box, ...]) -> Iterator[Box]:
        place = 0
        for box in boxes:
            start, stop = max(low, box.in_layer.start), min(high, box.in_layer.stop)
            if start < stop:
                yield Box(box.tensor, start, stop - start, place, start - low)
                place += stop - start

    chunks = {
        share: tuple(tuple(clipped(boxes)) for boxes in chunks)
        for share, chunks in rows.chunks.items()
    }
    return replace(
        rows, part=OwnedPart((OwnedRange(low, high - low, high - low, high - low),)), chunks=chunks
    )


def _as_rank(context: Context, rank: int, bounds: Bounds) -> Context:
    """The context of a rank that updates some elements of each layer."""
    strategy = context.graph.strategy.model_copy(update={"zero": 1, "dp": RANKS})
    rows = {
        layer: _part(rows, *bounds[layer][rank : rank + 2]) for layer, rows in context.rows.items()
    }
    groups = replace(context.groups, at=Coordinates(0, rank, 0), strategy=strategy)
    graph = replace(context.graph, strategy=strategy)
    return replace(context, graph=graph, rows=rows, groups=groups)


def _written_by_ranks(worker: NativeWorker, path: Path, folder: Path, bounds: Bounds) -> Manifest:
    """What ranks write into `folder` that go on, one after the other, from the checkpoint."""
    context, found = context_of(worker), latest(path)
    savers = []
    for rank in range(RANKS):
        part = _as_rank(context, rank, bounds)
        part.memory.poison_all()
        restore(part, found)
        saver = Saver(part, folder, found.manifest)
        if rank == 0:
            saver.prepare()
        for action in expand(worker._program.save):
            if action.op is Op.CKPT:
                saver.write(action)
        assert saver.ended, saver.error
        savers.append(saver)
    for saver in savers[1:]:
        saver.close()
    assert not savers[0].seal(file for saver in savers for file in saver.stored)
    saved = savers[0].commit("")
    assert not saved.error
    return latest(folder).manifest


@pytest.mark.parametrize(("seed", "precision"), [(0, "fp32"), (1, "bf16")])
@pytest.mark.parametrize(
    "make",
    [resident, away, lambda **how: away(Tier.NVME, chunk=5_000, **how), passing],
    ids=["resident", "away", "nvme", "passing"],
)
def test_one_process_goes_on_from_what_sharded_ranks_wrote(
    tmp_path: Path, make: Callable[..., Plan], seed: int, precision: str
) -> None:
    with running(make(precision=precision)) as (worker, _):
        for _ in range(2):
            worker.step()
        path = worker.save(tmp_path / "whole")
        context, state = context_of(worker), state_of(worker)
        bounds = _bounds(context, Random(seed))
        manifest = _written_by_ranks(worker, path, tmp_path / "parts", bounds)
        context.memory.poison_all()
        restore(context, latest(tmp_path / "parts"))
        same("state", state, state_of(worker))

    each = latest(path).manifest
    assert _elements(manifest) == _elements(each)  # nothing is written twice
    last = max(context.program.layers)
    assert [file.name for file in manifest.files] == [
        f"layer-{layer:04d}-rank-{rank:04d}.safetensors"
        for layer in range(last + 1)
        for rank in range(RANKS)
        if (layer, rank) != (last, RANKS - 1)
    ]
    sizes = [size for layer in bounds.values() for size in layer]
    assert any(size * ELEMENT % PAGE for size in sizes), "no part of a buffer began within a page"


def _elements(manifest: Manifest) -> int:
    return sum(tensor.rectangle.elements for file in manifest.files for tensor in file.tensors)
