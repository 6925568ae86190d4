"""Ranks whose machines share no folder: each machine keeps the checkpoint files that it wrote.

A place is what shares a folder: a machine, or some of them. What every place has of a checkpoint,
its manifest says; what a rank needs and its place lacks is brought there before it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
