"""Where a run's files are on a node, and how ranks get those of another.

If a node's environment names a folder (BIGPLAN_RUN_DIR), the node keeps the files of all runs
there. On other nodes a run has the launch's own path. Nodes that see one folder are one place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bigplan.errors import CheckpointError
from bigplan.launcher.checkpoints import FOLDER, checkpoints, remove

if TYPE_CHECKING:
    from bigplan.runtime.manifest import StoredFile

RUN_DIR = "BIGPLAN_RUN_DIR"
PART = 64 << 20  # bytes of a file that come at once
MARK = ".bigplan-place-"  # how the name of a file begins by which nodes see that they share one


@dataclass(frozen=True)
class Places:
    """All places of a crew: the ranks of each, and the node to ask for its files."""

    ranks: Mapping[str, tuple[int, ...]]
    nodes: Mapping[str, str]  # Ray's key
    run: Path  # as the launch names it

    def of(self, rank: int) -> str:
        """The place of a rank."""
        return next(place for place, ranks in self.ranks.items() if rank in ranks)

    def bring(self, path: Path, file: StoredFile) -> None:
        """Put a file at a path, from whichever place has it. Raises CheckpointError."""
        coming = path.with_name(f"{path.name}.{os.getpid()}.coming")
        try:
            for place in file.places:
                if place in self.nodes and self._came(place, coming, path.parent.name, file):
                    coming.replace(path)
                    return
        finally:
            coming.unlink(missing_ok=True)
        raise CheckpointError(
            f"{file.name} of {path.parent.name} is on {' and '.join(file.places)} alone, and "
            "cannot be had from there: bring that node back with its files"
        )

    def _came(self, place: str, coming: Path, step: str, file: StoredFile) -> bool:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(self.nodes[place], soft=False)
        read = ray.remote(part_of).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
        with coming.open("wb") as out:
            for offset in range(0, file.nbytes, PART):
                try:
                    out.write(ray.get(read.remote(self.run, step, file.name, offset)))
                except (ray.exceptions.RayError, OSError):
                    return False
        return True


def part_of(run: Path, step: str, name: str, offset: int) -> bytes:
    """On the node that has it: so many bytes of a checkpoint's file. Raises OSError."""
    with (own_run(run) / FOLDER / step / name).open("rb") as file:
        file.seek(offset)
        return file.read(PART)


def own_run(run: Path) -> Path:
    """The folder of a run on this node."""
    elsewhere = os.environ.get(RUN_DIR)
    if not elsewhere:
        return run
    # Runs of one name in two folders must not share their files.
    mark = hashlib.sha256(str(run).encode()).hexdigest()[:8]
    return Path(elsewhere) / f"{run.name}-{mark}"


def leave_mark(run: Path, node: str) -> None:
    """Let other nodes see whether they see the same folder."""
    run.mkdir(parents=True, exist_ok=True)
    (run / f"{MARK}{node}").touch()


def marks(run: Path) -> tuple[str, ...]:
    """The nodes that left one here."""
    return tuple(sorted(path.name.removeprefix(MARK) for path in run.glob(f"{MARK}*")))


def remove_mark(run: Path, node: str) -> None:
    """The mark goes."""
    (run / f"{MARK}{node}").unlink(missing_ok=True)


def shared_out(seen: Mapping[int, tuple[str, ...]], names: Mapping[str, str]) -> dict[int, str]:
    """A place for every rank, named like the first of its nodes.

    `seen`: the nodes whose marks a rank saw; `names`: of nodes, by Ray's key.
    """
    return {rank: min(names[key] for key in keys if key in names) for rank, keys in seen.items()}


def receive(run: Path, step: str, manifest: str) -> None:
    """Have a checkpoint's manifest here; files of another one of that step go."""
    from bigplan.runtime.manifest import NAME

    folder = run / FOLDER / step
    if (folder / NAME).exists() and (folder / NAME).read_text() == manifest:
        return
    partial = folder.with_name(f"{step}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / NAME).write_text(manifest)
    if folder.exists():
        remove(folder)
    partial.rename(folder)


def keep_only(run: Path, steps: Iterable[str]) -> None:
    """Remove the checkpoints that the launch has removed."""
    kept = set(steps)
    for path in checkpoints(run):
        if path.name not in kept:
            remove(path)
