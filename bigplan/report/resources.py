"""How long resources work in a step that was played or measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from bigplan.program import Lane, resource
from bigplan.timeline import Timeline


def resource_seconds(timeline: Timeline) -> dict[str, float]:
    """Seconds in which a resource works, of the stage where it works most.

    Copies that take turns on a link are each as long as both, so time is counted, not copies.
    """
    spans: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for event in timeline.events:
        spans[event.stage, resource(Lane(event.lane))].append((event.start, event.end))
    worst: dict[str, float] = {}
    for (_, name), times in spans.items():
        worst[name] = max(worst.get(name, 0.0), covered(times))
    return worst


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, 0.0
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
