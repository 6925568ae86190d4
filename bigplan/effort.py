"""How much a search tries."""

from __future__ import annotations

from enum import StrEnum


class Effort(StrEnum):
    """What the user asks for. `solve/improve.py` turns it into limits of the search."""

    USUAL = "usual"
    HIGH = "high"
