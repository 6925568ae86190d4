"""What would help a plan, as it was solved again."""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.whatif import Answer


@dataclass(frozen=True, slots=True)
class Help:
    """Changes of the cluster, solved again, and the step that they are held against.

    That is the fastest step of the same problem: slower than it is a plan whose decisions were
    pinned, or whose search was stopped.
    """

    before_seconds: float
    answer: Answer
