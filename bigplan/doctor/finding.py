"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["good", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, and what to do.

    `good`: nothing is to be done. `note`: bigplan works, with less or more slowly. `bad`: something
    that it needs does not work.
    """

    topic: str
    name: str
    state: State
    found: str
    remedy: str = ""
