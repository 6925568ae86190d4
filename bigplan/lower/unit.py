"""One accumulation group within a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """Micro-batches that pass each layer together."""

    base: int  # the first micro-batch
    first: bool = False  # gradients start from nothing; pending updates run before each layer
    last: bool = False  # gradients are final
