"""One result of an examination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["good", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact, and what to do about it.

    `good`: nothing to do. `note`: bigplan works, but with less or more slowly. `bad`: something
    that bigplan needs does not work.
    """

    topic: str
    name: str
    state: State
    found: str
    remedy: str = ""
