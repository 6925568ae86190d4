"""One accumulation group within a step."""

from __future__ import annotations

from typing import NamedTuple


class AccumulationGroup(NamedTuple):
    """Micro-batches that pass each layer together."""

    base: int  # the first micro-batch
    turn: int = 0  # which of the stage's chunks
    first: bool = False  # gradients start from nothing; the first layer starts the table's sum
    last: bool = False  # gradients are final

    @property
    def opens(self) -> bool:
        """Whether a stage's step begins with this group."""
        return self.base == 0 and self.turn == 0
