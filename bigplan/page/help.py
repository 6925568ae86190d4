"""Changes of the cluster that would help a plan, each solved again."""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.whatif import Answer


@dataclass(frozen=True, slots=True)
class Help:
    """Changes of the cluster, solved again, and the step that they are held against.

    The baseline is the fastest step of the same problem. A plan is slower than it where its
    decisions were pinned or its search was stopped.
    """

    before_seconds: float
    answer: Answer
