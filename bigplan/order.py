"""The order of a rank's actions: what each action waits for, from what it reads and changes.

Two actions that use the same place take turns, if at least one of them changes it. The rules are in
Waits. `order_of` applies them to the numbers of actions, for the runtime. The simulator applies
them to the times at which actions end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Generic, NamedTuple, TypeVar

from bigplan.placement import Share
from bigplan.program import Action, Buffer, Lane, Op, Ref

End = TypeVar("End")

# Lanes whose actions wait for earlier forwards, in program order, whose activations leave the GPU.
# Copies on one link take turns. Chunks of state that ran far ahead would take the link from
# activations. The next forward would then wait for those activations to leave.
PACED = (Lane.STATE_IN,)
SETS_PACE = (Op.SAVE,)  # the copy of a forward's activations from the GPU

Places = tuple[int, ...]
# A ring's first place, its entry for micro-batch 0, and its number of entries.
Moving = tuple[int, int, int]


class Uses(NamedTuple):
    """The places that an action uses, and whether it waits for the pace or sets the pace."""

    reads: Places
    changes: Places
    moving_reads: tuple[Moving, ...]  # rings whose entry depends on the micro-batch
    moving_changes: tuple[Moving, ...]
    paced: bool  # it waits for the pace
    sets_pace: bool
    always: tuple[Places, Places] | None  # reads and changes, where they follow no micro-batch

    def at(self, micro_batch: int) -> tuple[Places, Places]:
        """The places read and changed for a micro-batch."""
        if self.always is not None:
            return self.always
        reads, changes = self.reads, self.changes
        if self.moving_reads:
            moved = [first + (i + micro_batch) % n for first, i, n in self.moving_reads]
            reads = (*reads, *moved)
        if self.moving_changes:
            moved = [first + (i + micro_batch) % n for first, i, n in self.moving_changes]
            changes = (*changes, *moved)
        return reads, changes


# A buffer's first place, its number of entries, the shares whose rows are separate places, and the
# place in whose memory the buffer begins, if any.
_Ring = tuple[int, int, tuple[Share, ...], tuple[int, ...]]


class EntryPlaces:
    """The places of a program's buffers, numbered from 0 to `count`.

    A place is an entry of a buffer. Where a buffer has shares, a place is the rows of one share in
    an entry: the shares' rows are used independently.
    """

    def __init__(self, buffers: Mapping[str, Buffer]) -> None:
        self.count = 0
        self._rings: dict[str, _Ring] = {}
        for name, buffer in buffers.items():
            within = (self._rings[buffer.within][0],) if buffer.within else ()
            self._rings[name] = self.count, buffer.count, buffer.shares, within
            self.count += buffer.count * max(1, len(buffer.shares))

    def uses(self, action: Action) -> Uses:
        """What an action uses; `Uses.at` gives the places for a micro-batch."""
        reads, moving_reads = self._of(action.reads)
        changed = action.writes + action.frees if action.frees else action.writes
        changes, moving_changes = self._of(changed)
        paced, sets_pace = action.lane in PACED, action.op in SETS_PACE
        always = None if moving_reads or moving_changes else (reads, changes)
        return Uses(reads, changes, moving_reads, moving_changes, paced, sets_pace, always)

    def _of(self, refs: tuple[Ref, ...]) -> tuple[Places, tuple[Moving, ...]]:
        """The places of fixed refs, and the rings of refs whose entry the micro-batch selects."""
        if not refs:
            return (), ()
        fixed: list[int] = []
        moving: list[Moving] = []
        for name, _, entry, moves, rows in refs:
            first, count, shares, within = self._rings[name]
            if moves:
                assert not shares, "what shares use apart follows no micro-batch"
                moving.append((first, entry, count))
            elif not shares:
                fixed.append(first + entry % count)
            else:
                first += entry % count * len(shares)
                own = (shares.index(rows),) if rows else range(len(shares))
                fixed += [first + share for share in own]
            if within:
                fixed += within
        return tuple(fixed), tuple(moving)


@dataclass(slots=True)
class Waits(Generic[End]):
    """The rules of waiting. An End is an action number or a time: what `latest` can compare.

    An action that reads a place waits for the last action that changed it. An action that changes a
    place waits for the last change and for all reads since. Actions of PACED lanes also wait for
    the pace: the last forward before them whose activations leave.
    """

    count: int  # number of places
    nothing: End  # the end of an action that never ran
    latest: Callable[[Iterable[End]], End]  # of some; the first of those that are equal
    changed: list[End] = field(init=False)  # by place: end of the last change
    used: list[End] = field(init=False)  # by place: end of the last change or read
    pace: End = field(init=False)

    def __post_init__(self) -> None:
        self.changed, self.used = [self.nothing] * self.count, [self.nothing] * self.count
        self.pace = self.nothing

    def begin(self, uses: Uses, reads: Places, changes: Places, ready: End) -> End:
        """When an action may begin; `ready` is when it could begin by all other rules."""
        changed, used = self.changed, self.used
        read = [changed[place] for place in reads]
        ends = [ready, *read, *[used[place] for place in changes]]
        if uses.paced:
            ends.insert(1, self.pace)
        if uses.sets_pace:
            self.pace = self.latest([self.nothing, *read])
        return self.latest(ends)

    def end(self, reads: Places, changes: Places, end: End) -> None:
        """Record that an action with these reads and changes ends at `end`."""
        latest, changed, used = self.latest, self.changed, self.used
        for place in reads:
            used[place] = latest((used[place], end))
        for place in changes:
            changed[place] = used[place] = end


@dataclass(slots=True)
class TimeWaits(Waits[float]):
    """The same rules for times, by comparisons in place of calls.

    A search plays a hundred thousand actions and more, each in a third of the time. Of equal times
    the first is kept, as by `max`.
    """

    def begin(self, uses: Uses, reads: Places, changes: Places, ready: float) -> float:
        """When an action may begin; `ready` is when it could begin by all other rules."""
        changed, used = self.changed, self.used
        if uses.paced and self.pace > ready:
            ready = self.pace
        if uses.sets_pace:
            self.pace = max([self.nothing, *[changed[place] for place in reads]])
        for place in reads:
            if (end := changed[place]) > ready:
                ready = end
        for place in changes:
            if (end := used[place]) > ready:
                ready = end
        return ready

    def end(self, reads: Places, changes: Places, end: float) -> None:
        """Record that an action with these reads and changes ends at `end`."""
        changed, used = self.changed, self.used
        for place in reads:
            if used[place] < end:  # noqa: PLR1730 -- a call takes three times as long
                used[place] = end
        for place in changes:
            changed[place] = used[place] = end


# For each lane, the number of the last action waited for. Earlier actions of a lane end before it.
Last = Mapping[Lane, int]
# Actions, each with the numbers of the actions that it waits for.
Order = tuple[tuple[Action, tuple[int, ...]], ...]


def order_of(buffers: Mapping[str, Buffer], actions: Iterable[Action]) -> Order:
    """The actions that every action waits for on other lanes: at most the last of each lane.

    What an action comes after anyway, behind its lane or behind another that it waits for, is left
    out: a third of the waits of two programs by ZeRO-3 and with drives.
    """
    places = EntryPlaces(buffers)
    waits = Waits[Last](places.count, {}, lambda ends: reduce(_later, ends))
    found: list[tuple[Action, tuple[int, ...]]] = []
    after: list[Last] = []  # by action, itself and all that ends before it starts
    lanes: dict[Lane, Last] = {}  # that of each lane's last action
    for number, action in enumerate(actions):
        uses = places.uses(action)
        reads, changes = uses.at(action.micro_batch)
        last = waits.begin(uses, reads, changes, {})
        waits.end(reads, changes, {action.lane: number})
        known, needed = lanes.get(action.lane, {}), list[int]()
        for other, lane in sorted(((n, lane) for lane, n in last.items()), reverse=True):
            if lane is not action.lane and known.get(lane, -1) < other:
                needed.append(other)
                known = _later(known, after[other])
        lanes[action.lane] = {**known, action.lane: number}
        after.append(lanes[action.lane])
        found.append((action, tuple(needed)))
    return tuple(found)


def _later(one: Last, other: Last) -> Last:
    if not one or one is other:
        return other
    latest = dict(one)
    for lane, number in other.items():
        if latest.get(lane, -1) < number:
            latest[lane] = number
    return latest
