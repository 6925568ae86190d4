"""Tiles that were timed once and are kept: by kernel, shape bucket, dtypes, GPU and Triton version.

Tuning is optional: without it the model's first pick runs, and nothing reads this file. With
`tune=N` a kernel's best N tiles are timed at its first launch. All kernels with the same operations
and with rows and columns in the same buckets then find the fastest tile in the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from bigplan.cost.kernel import Shape, Tile
from bigplan.kernels.fusion.body import Body
from bigplan.kernels.fusion.fuse import power_of_two, tiles_of

if TYPE_CHECKING:
    from torch import Tensor

    from bigplan.kernels.launch import LaunchedKernel

CALLS, WARM = 15, 3
VERSION = 1  # of the file


def default_file() -> Path:
    """Where picks are kept: below $XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "bigplan" / "kernels" / "tuned.json"


def key_of(body: Body, gpu: str, triton: str) -> str:
    """What a pick is kept by; operations by a digest, sizes by the power of two that holds them."""
    operations = [(m.op, m.arguments, m.varies, m.number, m.source) for m in body.micros]
    stored = [(s.value.name, s.micro, s.varies) for s in body.stores]
    names = [value.name for value in (*body.inputs, *body.outputs)]
    # A tensor's name is of the graph that it was met in: what counts is its place.
    text = repr((operations, stored))
    for index, name in sorted(enumerate(names), key=lambda pair: -len(pair[1])):
        text = text.replace(repr(name), f"tensor {index}")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    dtypes = ",".join(value.dtype for value in (*body.inputs, *body.outputs))
    bucket = f"{power_of_two(body.rows)}x{power_of_two(body.width)}"
    return f"{digest} {bucket} {dtypes} {gpu} triton-{triton}"


@dataclass(frozen=True)
class PickFile:
    """A file of picks."""

    path: Path

    def read(self) -> Mapping[str, Tile]:
        """All picks; none if there is no file, or if it is broken or of another version."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["version"] != VERSION:
                return {}
            return {key: _tile(fields) for key, fields in found["tiles"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def keep(self, key: str, tile: Tile) -> None:
        """Add a pick; what others have added meanwhile stays, and a reader sees all or nothing."""
        tiles = {**self.read(), key: tile}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"version": VERSION, "tiles": {k: asdict(t) for k, t in tiles.items()}})
        with NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).replace(self.path)


def _tile(fields: Mapping[str, Any]) -> Tile:
    return Tile(**{**fields, "shape": Shape(fields["shape"])})


@dataclass(frozen=True)
class Tuner:
    """Gives kernels their tile: one that is kept, or the fastest of the model's best few."""

    best: int
    gpu: str
    multiprocessors: int
    store: PickFile
    seconds: Callable[[Callable[[], object]], float] | None = None  # None: by CUDA events

    def tune(self, kernel: LaunchedKernel, inputs: Sequence[Tensor]) -> None:
        """Set the kernel's tile; what is timed runs on these inputs, into tensors of its own."""
        import triton

        key = key_of(kernel.body, self.gpu, triton.__version__)
        kept = self._fitting(kernel.body, self.store.read().get(key))
        if kept is not None:
            kernel.take(kept)
            return
        kernel.tune(inputs, self.best, self.seconds or cold_seconds)
        self.store.keep(key, kernel.tile)

    def _fitting(self, body: Body, tile: Tile | None) -> Tile | None:
        """A kept tile for these rows and columns, if it is a candidate for them."""
        if tile is None:
            return None
        if tile.programs:  # strips there are no more of than tiles of rows
            tile = replace(tile, programs=min(tile.programs, -(-body.rows // tile.rows)))
        return tile if tile in tiles_of(body, self.multiprocessors) else None


def cold_seconds(work: Callable[[], object]) -> float:
    """Median of calls whose inputs are not in the L2 cache, by CUDA events."""
    import torch

    event: Any = torch.cuda.Event
    other = torch.empty(2**28, dtype=torch.uint8, device="cuda")  # more than any L2 cache
    times: list[float] = []
    for _ in range(WARM + CALLS):
        other.zero_()
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times[WARM:])
