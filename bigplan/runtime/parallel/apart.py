"""Ranks whose machines share no folder: each machine keeps the checkpoint files that it wrote.

A place is one machine, or several machines that share a folder. A checkpoint's manifest says which
files every place has. If a rank needs a file that its place lacks, the file is brought there first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bigplan.runtime.manifest import StoredFile

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
