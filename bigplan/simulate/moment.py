"""Times that know their cause, for the walk back along the critical path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bigplan.program import Action


class Moment(float):
    """The end of an action, in seconds from the start of the step.

    `before` is the time at which the action began, which is the end of its last cause. Maxima keep
    the object, so an action that waits for several times has the latest of them.
    """

    __slots__ = ("before", "cause")

    cause: Action | Skipped
    before: float

    @classmethod
    def of(cls, seconds: float, cause: Action | Skipped, before: float) -> Moment:
        """The time `seconds`, caused by an action that began at `before`."""
        made = cls(seconds)
        made.cause, made.before = cause, before
        return made


@dataclass(frozen=True, slots=True)
class Skipped:
    """`rounds` repetitions that were not played; all are like the last one that was.

    `first`, `last`: the times at the beginning and at the end of the last played repetition. Both
    have one order of roles, though a role may have moved to another entry of its ring.
    """

    rounds: int
    seconds: float  # of all repetitions together
    first: Sequence[float]
    last: Sequence[float]
    _places: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._places.update({id(time): place for place, time in enumerate(self.first)})

    def successor(self, time: float) -> float | None:
        """The time one repetition later; None if it is not a time of the beginning."""
        place = self._places.get(id(time))
        return None if place is None else self.last[place]

    def later(self, time: float) -> float:
        """A time of the end, shifted by these repetitions."""
        moved = time + self.seconds
        return Moment.of(moved, self, time) if isinstance(time, Moment) else moved
