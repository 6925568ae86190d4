"""A step's actions as bars of a picture: few enough to draw, each saying which actions it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bigplan.content import ADAPTERS
from bigplan.program import Lane, Op
from bigplan.timeline import Event

MOST_BARS = 6000  # of a chart: with twice as many, a browser redraws too slowly to zoom
FINEST = 1 / 20_000  # of the step: shorter is less than a tenth of a pixel before zooming
MIXED = 1 / 2_000  # of the step: about a pixel

PASSES, MOVES = "forward", "moves of activations"
GROUPS: dict[str, tuple[str, ...]] = {
    PASSES: (Op.FORWARD,),
    "backward": (Op.BACKWARD,),
    "update": (Op.UPDATE, Op.NORM, Op.CLIP, Op.STATE_IN, Op.STATE_OUT),
    "parameters": (Op.LOAD, Op.LOOK_UP, Op.GATHER, Op.PARAM_OUT),
    "gradients": (Op.REDUCE, Op.SUM_REPLICAS, Op.TENSOR_REDUCE, Op.GRAD_OUT, Op.ACCUMULATE),
    MOVES: (Op.SAVE, Op.FETCH),
    "drives": (Op.READ, Op.WRITE),
    "messages": (Op.SEND, Op.RECV),
}
OTHER = "other"
_GROUP = {op: name for name, ops in GROUPS.items() for op in ops}
ORDER = {lane.value: number for number, lane in enumerate(Lane)}


@dataclass(frozen=True, slots=True)
class Bar:
    """`times` neighbouring actions of one kind on a lane, so close that they are drawn as one."""

    row: str
    what: str
    group: str
    start: float
    end: float
    critical: bool
    first: int  # layers
    last: int
    busy: float  # seconds in which they run
    times: int = 1

    @property
    def share(self) -> float:
        """Share of the bar's length in which its actions run."""
        return min(1.0, self.busy / (self.end - self.start))

    @property
    def layers(self) -> str:
        """'3', '3 to 7', or '-' where there are none."""
        if self.last < 0:
            return "-"
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


def bars(
    events: Sequence[Event], seconds: float, critical: Collection[int] = (), most: int = MOST_BARS
) -> list[Bar]:
    """At most `most` bars, a row per stage and lane, where that is possible.

    Two neighbours of one kind become one bar where the gap between them and the length of one of
    them are below a threshold. The threshold doubles until the bars are few enough. From MIXED on,
    neighbours of different kinds are joined as well while both are below it; the longer one gives
    the name.
    """
    several = len({event.stage for event in events}) > 1
    rows: dict[tuple[int, str], list[Bar]] = defaultdict(list)
    for number, event in enumerate(events):
        if event.end > event.start:  # events of no length cannot be shown
            made = _bar(event, row_name(event, several=several), number in critical)
            rows[event.stage, event.lane].append(made)
    for members in rows.values():
        members.sort(key=lambda bar: bar.start)
    gap = FINEST * seconds
    while sum(map(len, rows.values())) > most and gap < seconds:
        for row, members in rows.items():
            rows[row] = list(_joined(members, gap, mixed=gap > MIXED * seconds))
        gap *= 2
    ordered = sorted(rows, key=lambda row: (row[0], ORDER.get(row[1], len(ORDER))))
    return [bar for row in ordered for bar in rows[row]]


def row_name(event: Event, *, several: bool) -> str:
    """The lane's name; with several stages, the stage stands before it."""
    return f"{event.stage} · {event.lane}" if several else event.lane


def _bar(event: Event, row: str, critical: bool) -> Bar:
    group = _GROUP.get(event.op, OTHER)
    what, layer = event.op.replace("_", " "), event.layer
    if layer == ADAPTERS:
        what, layer = f"{what} of adapters", -1
    return Bar(row, what, group, event.start, event.end, critical, layer, layer, event.seconds)


def _joined(members: Iterable[Bar], gap: float, *, mixed: bool) -> Iterator[Bar]:
    held: Bar | None = None
    for bar in members:
        if held is None:
            held = bar
            continue
        alike = (held.what, held.critical) == (bar.what, bar.critical)
        shorter = min(held.end - held.start, bar.end - bar.start)
        close = alike and bar.start - held.end < gap and shorter < gap
        if close or (mixed and bar.end - held.start < gap):
            held = _one(held, bar)
        else:
            yield held
            held = bar
    if held is not None:
        yield held


def _one(first: Bar, second: Bar) -> Bar:
    longer = max(first, second, key=lambda bar: bar.end - bar.start)
    return replace(
        longer,
        start=first.start,
        end=max(first.end, second.end),
        first=min(first.first, second.first),
        last=max(first.last, second.last),
        busy=first.busy + second.busy,
        times=first.times + second.times,
    )
