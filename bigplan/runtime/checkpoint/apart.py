"""Ranks whose machines share no folder: each machine keeps the checkpoint files that it wrote.

A place is what shares a folder: a machine, or some of them. What every place has of a checkpoint,
its manifest says; what a rank needs and its place lacks is brought there before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bigplan.errors import CheckpointError
from bigplan.runtime.checkpoint.manifest import StoredFile

Bring = Callable[[Path, StoredFile], None]  # puts a file of another place at a path


@dataclass(frozen=True)
class Apart:
    """A rank's place, and how it gets files of others."""

    place: str  # its name
    ranks: tuple[int, ...]  # of this place, in order
    bring: Bring

    def speaks(self, rank: int) -> bool:
        """Whether that rank makes folders and names them, for all of its place."""
        return rank == self.ranks[0]


def merged(files: Iterable[StoredFile]) -> tuple[StoredFile, ...]:
    """Each file once, with all places that have it. Raises CheckpointError where copies differ.

    They are of ranks that hold the same state.
    """
    found: dict[str, StoredFile] = {}
    for file in files:
        other = found.setdefault(file.name, file)
        if other is file:
            continue
        places = tuple(sorted({*other.places, *file.places}))
        if other.model_copy(update={"places": places}) != file.model_copy(
            update={"places": places}
        ):
            raise CheckpointError(
                f"ranks that hold the same state wrote {file.name} differently: their weights have "
                "come apart, and this checkpoint is not kept"
            )
        found[file.name] = other.model_copy(update={"places": places})
    return tuple(sorted(found.values(), key=lambda file: (file.layer, file.name)))
