"""Memory in use over a step: when every entry of a buffer is filled and released.

A plan allocates all its buffers before the first step, so its promise is constant. The content
changes: activations come with the forward and go with the backward, slots are filled in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bigplan.placement import Tier
from bigplan.program import Action, Buffer, Op, Program, entry, expand
from bigplan.timeline import Event
from bigplan.verify.contents import LASTING

BINS = 240  # moments of a step that a picture shows; each shows the largest use within it

RowKey = tuple[str, int]  # a buffer and an entry of it
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Level:
    """`nbytes` of a purpose are in use on a tier of a stage from the second `start` to `end`."""

    stage: int
    tier: Tier
    purpose: str
    start: float
    end: float
    nbytes: int


def levels(
    programs: Sequence[Program], events: Sequence[Event], seconds: float, ranks_per_node: int
) -> list[Level]:
    """Levels of all stages, one behind the other: per GPU, and per node of host memory and drives.

    `events` are those of the step in the order of `simulate`.
    """
    by_stage: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_stage[event.stage].append(event)
    return [
        level
        for program in programs
        for level in _stage(program, by_stage[program.stage], seconds, ranks_per_node)
    ]


def _stage(
    program: Program, events: Sequence[Event], seconds: float, ranks_per_node: int
) -> Iterator[Level]:
    spans = _spans(program, events, seconds)
    changes: dict[tuple[Tier, str], list[tuple[float, int]]] = defaultdict(list)
    for buffer in program.buffers.values():
        scale = 1 if buffer.tier is Tier.GPU else ranks_per_node
        for (start, end), nbytes in _used(program, buffer, spans, seconds):
            changes[buffer.tier, buffer.purpose] += [
                (start, nbytes * scale),
                (end, -nbytes * scale),
            ]
    for (tier, purpose), moments in changes.items():
        for start, end, nbytes in _binned(moments, seconds):
            yield Level(program.stage, tier, purpose, start, end, nbytes)


def _used(
    program: Program, buffer: Buffer, spans: Mapping[str, list[Interval]], seconds: float
) -> Iterator[tuple[Interval, int]]:
    """Spans of the step in which so many bytes of the buffer are in use.

    Parameters and state outlast the step, and so does memory that no action names (a workspace).
    Tensors that compute makes itself, and those within another buffer, count as the program adds
    them.
    """
    whole = (0.0, seconds)
    lasting = buffer.home_of is not None and buffer.home_of.kind in LASTING
    if lasting or buffer.name not in spans:
        yield whole, program.added_bytes(buffer)
        return
    for span in spans[buffer.name]:
        yield span, buffer.nbytes


def _spans(program: Program, events: Sequence[Event], seconds: float) -> dict[str, list[Interval]]:
    """By buffer, the times from and to which an entry of it is in use."""
    actions = (action for action in expand(program.step) if action.op is not Op.FREE)
    touched: dict[RowKey, list[tuple[Event, bool]]] = defaultdict(list)
    for action, event in zip(actions, events, strict=True):
        for key, fills in _touches(action, program.buffers):
            touched[key].append((event, fills))
    found: dict[str, list[Interval]] = defaultdict(list)
    for (buffer, _), uses in touched.items():
        found[buffer] += _lives(uses, seconds)
    return found


def _touches(action: Action, buffers: Mapping[str, Buffer]) -> Iterator[tuple[RowKey, bool]]:
    """Entries that an action uses, and whether it fills them with something new."""
    reads = {entry(ref, buffers, action.micro_batch) for ref in action.reads}
    writes = {entry(ref, buffers, action.micro_batch) for ref in action.writes}
    frees = {entry(ref, buffers, action.micro_batch) for ref in action.frees}
    for key in reads | writes | frees:
        yield key, key in writes and key not in reads


def _lives(uses: Sequence[tuple[Event, bool]], seconds: float) -> Iterator[Interval]:
    """An entry is in use from a fill until its last use before the next fill.

    A step finds the content that the step before left. So the last fill's content lasts to the end.
    """
    fills = [number for number, (_, fills) in enumerate(uses) if fills]
    if not fills:
        yield 0.0, seconds
        return
    if fills[0] > 0:
        yield 0.0, _last(uses[: fills[0]])
    for first, after in pairwise([*fills, len(uses)]):
        ends = after == len(uses) and fills[0] > 0
        yield uses[first][0].start, seconds if ends else _last(uses[first:after])


def _last(uses: Iterable[tuple[Event, bool]]) -> float:
    return max(event.end for event, _ in uses)


def _binned(moments: list[tuple[float, int]], seconds: float) -> Iterator[tuple[float, float, int]]:
    """The use by bins of the step: each bin's largest value, equal neighbours joined.

    At one moment, releases count before fills, because a release makes room for a fill.
    """
    width, height = seconds / BINS, 0
    most = [0] * BINS
    reached = 0  # the bin in which the last change was
    for moment, change in sorted(moments):
        bin_ = min(BINS - 1, int(moment / width))
        for between in range(reached + 1, bin_ + 1):
            most[between] = height
        reached = bin_
        height += change
        most[bin_] = max(most[bin_], height)
    start = 0
    for i in range(1, BINS + 1):
        if i == BINS or most[i] != most[start]:
            yield start * width, i * width, most[start]
            start = i
