"""What happened when, on which resource: predicted by the simulator or measured by the runtime."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bigplan.content import ADAPTERS


class Event(NamedTuple):
    """One action's time in seconds from the start of its step."""

    stage: int
    lane: str
    op: str
    layer: int
    micro_batch: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start

    @property
    def where(self) -> str:
        """The layer in words."""
        return "adapters" if self.layer == ADAPTERS else str(self.layer)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one step, one rank per stage."""

    events: tuple[Event, ...]
    seconds: float  # the whole step

    @classmethod
    def together(cls, stages: Iterable[Timeline]) -> Timeline:
        """One timeline of a step, from the timelines that the stages measured."""
        each = tuple(stages)
        events = tuple(event for one in each for event in one.events)
        return cls(events, max(one.seconds for one in each))

    def total_by(self, key: Callable[[Event], str]) -> dict[str, float]:
        """Seconds of the events of all stages, added up by `key`."""
        totals: dict[str, float] = defaultdict(float)
        for event in self.events:
            totals[key(event)] += event.seconds
        return dict(totals)

    def busy(self) -> dict[str, float]:
        """For each lane, the seconds of events on the stage where the lane has most."""
        worst: dict[str, float] = {}
        for stage in {event.stage for event in self.events}:
            alone = Timeline(tuple(e for e in self.events if e.stage == stage), self.seconds)
            for lane, seconds in alone.total_by(lambda event: event.lane).items():
                worst[lane] = max(worst.get(lane, 0.0), seconds)
        return worst

    def to_chrome(self) -> dict[str, Any]:
        """The timeline in Trace Event Format (microseconds), for Perfetto and chrome://tracing."""
        lanes = {lane: i for i, lane in enumerate(dict.fromkeys(e.lane for e in self.events))}
        names: list[Mapping[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}}
            for stage in sorted({e.stage for e in self.events})
        ]
        names += [
            {"ph": "M", "name": "thread_name", "pid": p, "tid": t, "args": {"name": lane}}
            for p in sorted({e.stage for e in self.events})
            for lane, t in lanes.items()
        ]
        return {"traceEvents": [*names, *(_chrome(event, lanes) for event in self.events)]}


def _chrome(event: Event, lanes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{event.op} {event.where}",
        "cat": event.op,
        "pid": event.stage,
        "tid": lanes[event.lane],
        "ts": event.start * 1e6,
        "dur": event.seconds * 1e6,
        "args": {"layer": event.layer, "micro_batch": event.micro_batch},
    }


def sums(parts: Iterable[tuple[object, float]]) -> dict[str, float]:
    """The parts of each name together, in the order in which names come."""
    found: dict[str, float] = {}
    for name, part in parts:
        found[str(name)] = found.get(str(name), 0.0) + part
    return found
