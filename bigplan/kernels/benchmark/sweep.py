"""Every tile of a kernel beside the one that the model picks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from rich.table import Table

from bigplan.cost.kernel import Tile
from bigplan.kernels.benchmark.cases import Case
from bigplan.kernels.benchmark.measuring import KernelBench
from bigplan.kernels.fusion.body import Body
from bigplan.kernels.fusion.fuse import tiles_of, work_of
from bigplan.kernels.fusion.price import Pricer
from bigplan.kernels.launch import DTYPES, LaunchedKernel, warmed
from bigplan.kernels.optimised import optimise

MOST_TILES, FEW_TILES = 96, 4  # of a kernel, evenly out of all; and in a rehearsal
AT_ONCE = 8  # tiles that a process compiles before it asks for more


@dataclass
class Swept:
    """A kernel of a case, and the tiles to measure, the model's pick first."""

    case: Case
    kernel: LaunchedKernel
    tiles: list[Tile]
    compiled: list[Future[None]]

    def wait(self) -> None:
        """Until all of its tiles are in Triton's cache."""
        for future in self.compiled:
            future.result()


def sweeps(bench: KernelBench, name: str, found: Sequence[Case]) -> None:
    """Measure the kernels of every second case; a table, and a record each."""
    table = Table(title=f"{name}: the model's first pick among all tiles")
    for column in ("kernel", "tiles", "pick us", "best us", "pick", "median", "predicted"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        # All cores compile what is measured later, in the order in which it is.
        for swept in list(_swept(bench, found[:2] if bench.small else found[::2], pool)):
            label = swept.case.label
            if bench.late(label):
                for future in swept.compiled:
                    future.cancel()
                continue
            swept.wait()
            row = _measured(bench, swept)
            bench.record("sweep", part=name, case=label, aside=swept.case.aside, **row)
            table.add_row(
                f"{label}: {len(swept.kernel.body.micros)} operations", str(len(row["times"])),
                f"{row['pick'] * 1e6:.1f}", f"{row['best'] * 1e6:.1f}",
                f"{row['best'] / row['pick']:.0%}", f"{row['best'] / row['median']:.0%}",
                f"{row['predicted'] * 1e6:.1f}",
            )  # fmt: skip
    bench.console.print(table)


def _swept(bench: KernelBench, found: Sequence[Case], pool: ProcessPoolExecutor) -> Iterator[Swept]:
    """The kernels of these cases, in the order of their launches, being compiled."""
    for case in found:
        with _always_generated():
            ours = optimise(case.function, gpu=bench.optimiser.gpu)
            ours(*case.inputs(bench.device, bench.dtype)).sum().backward()
        for kernel in ours.kernels.kernels:
            tiles = tiles_of(kernel.body, bench.optimiser.pricer.gpu.multiprocessors)
            step = max(1, len(tiles) // (FEW_TILES if bench.small else MOST_TILES))
            chosen = list(dict.fromkeys([kernel.tile, *tiles[::step]]))
            parts = [chosen[i : i + AT_ONCE] for i in range(0, len(chosen), AT_ONCE)]
            compiled = [pool.submit(compile_tiles, kernel.body, p) for p in parts if bench.cuda]
            yield Swept(case, kernel, chosen, compiled)


def compile_tiles(body: Body, tiles: Sequence[Tile]) -> None:
    """In a process of its own: what it leaves in Triton's cache is what counts."""
    for tile in tiles:
        warmed(body, tile)


def _measured(bench: KernelBench, swept: Swept) -> dict[str, Any]:
    kernel, body = swept.kernel, swept.kernel.body
    inputs = [
        torch.empty_strided(v.shape, v.strides, dtype=DTYPES[v.dtype], device=bench.device)
        for v in body.inputs
    ]
    for tensor in inputs:
        if tensor.is_floating_point():
            tensor.normal_()
    tiles = [t for t in swept.tiles if not bench.cuda or kernel.fits(t)]
    times = {str(t): bench.seconds(partial(kernel.run_as, t, inputs)) for t in tiles}
    if bench.tune:
        kernel.tune(inputs, bench.tune, bench.seconds)
    picked = swept.tiles[0]
    predicted = next(t.seconds for c, t in kernel.choices if c == picked or not bench.cuda)
    return {
        "pick": times[str(picked)], "best": min(times.values()), "median": median(times.values()),
        "predicted": predicted, "picked": str(picked), "tuned": str(kernel.tile), "times": times,
        "bytes": work_of(body).read + work_of(body).written,
    }  # fmt: skip


def _always_generated() -> AbstractContextManager[Any]:
    """Torch's own operators are no candidates: a sweep is about kernels."""
    return patch.object(Pricer, "torch", lambda *_: 1.0)
