"""Ranks on their way through their programs.

The order is `program.Dependencies`' order, kept as times instead of action numbers: an entry knows
when it was last written and when it was last used.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bigplan.content import Content
from bigplan.cost import Costs
from bigplan.errors import VerificationError
from bigplan.graph.graph import Graph
from bigplan.placement import Share
from bigplan.program import LINKS, PACED, Action, Lane, Op, Program, Ref, Repeat, walk
from bigplan.simulate.link import Link
from bigplan.simulate.moment import Moment
from bigplan.simulate.seconds import action_seconds
from bigplan.timeline import Event

Moving = tuple[int, int, int]  # a ring's first entry, its entry for micro-batch 0, its entries
# Lane, seconds; entries read and changed, fixed and moving; content of a message; the action.
Step = tuple[
    int,
    float,
    tuple[int, ...],
    tuple[Moving, ...],
    tuple[int, ...],
    tuple[Moving, ...],
    Content | None,
    Action,
]
Message = tuple[Content, int]  # of a micro-batch
Mail = dict[Message, float]  # when it has arrived
LANES = {lane: index for index, lane in enumerate(Lane)}
PACED_LANES = {LANES[lane] for lane in PACED}
PACE = len(LANES)  # clocks tell the end of the last forward whose activations leave, too


class _Ring(NamedTuple):
    """A buffer's entries, numbered through all buffers; rows that are used apart are several."""

    first: int
    length: int
    shares: tuple[Share, ...]
    within: tuple[int, ...]  # the entry in whose memory they are

    def entries(self, ref: Ref) -> Sequence[int]:
        """What a ref that does not move uses."""
        if not self.shares:
            return (self.first + ref.entry % self.length, *self.within)
        first = self.first + ref.entry % self.length * len(self.shares)
        if ref.rows:
            return (first + self.shares.index(ref.rows),)
        return range(first, first + len(self.shares))


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps, each with its micro-batch, `count` times; micro-batches advance by `stride`."""

    count: int
    stride: int
    steps: list[tuple[Step, int]]


@dataclass(slots=True)
class Rank:
    """One role on its way through its program."""

    stage: int
    segments: list[Segment]
    mail: Mail  # shared by all ranks; what was received is taken out
    events: list[Event] | None = None
    traced: bool = False  # times are moments, which know how they came about
    main: int | None = None  # the segment that is played in rounds
    links: dict[int, Link] = field(default_factory=dict)  # by lane that shares one
    clocks: list[float] = field(default_factory=list)  # by lane
    written: list[float] = field(default_factory=list)  # by entry: end of the last write
    used: list[float] = field(default_factory=list)  # by entry: end of the last read or write
    repetition: int = 0  # of the segment that is being played
    waiting: Message | None = None  # for this message
    at_round: bool = False
    ended: bool = False
    playing: Iterator[None] = field(init=False)

    def __post_init__(self) -> None:
        self.playing = self._play()

    def clock(self, lane: int) -> float:
        """When a lane, and the link it may share, has done what it was given so far."""
        link = self.links.get(lane)
        return self.clocks[lane] if link is None else max(self.clocks[lane], link.end)

    def resume(self) -> bool:
        """Go on until a message is missing or a round begins; False where it still is missing."""
        if self.ended or (self.waiting is not None and self.waiting not in self.mail):
            return False
        self.waiting, self.at_round = None, False
        next(self.playing, None)
        return True

    def _play(self) -> Iterator[None]:
        for number, segment in enumerate(self.segments):
            self.repetition = 0
            while self.repetition < segment.count:
                if number == self.main:
                    self.at_round = True
                    yield
                yield from self._repeat(segment, self.repetition * segment.stride)
                self.repetition += 1
        self.ended = True

    def _repeat(self, segment: Segment, base: int) -> Iterator[None]:
        clocks, written, used, mail = self.clocks, self.written, self.used, self.mail
        links = self.links
        for step, offset in segment.steps:
            lane, seconds, reads, moving_reads, changes, moving_changes, message, action = step
            number = base + offset
            if moving_reads:
                reads = (*reads, *[first + (i + number) % n for first, i, n in moving_reads])
            if moving_changes:
                changes = (*changes, *[first + (i + number) % n for first, i, n in moving_changes])
            start = max(clocks[lane], clocks[PACE]) if lane in PACED_LANES else clocks[lane]
            if message and action.op is Op.RECV:
                start = max(start, (yield from self._received((message, number))))
            for entry in reads:
                start = max(start, written[entry])
            for entry in changes:
                start = max(start, used[entry])
            link = links.get(lane)
            if action.op is Op.SAVE:
                clocks[PACE] = max(written[entry] for entry in reads)
            end = start + seconds if link is None else link.take(start, seconds)
            clocks[lane] = end = Moment.of(end, action, start) if self.traced else end
            for entry in reads:
                used[entry] = max(used[entry], end)
            for entry in changes:
                written[entry] = used[entry] = end
            if message and action.op is Op.SEND:
                mail[message, number] = end
            if self.events is not None and action.op is not Op.FREE:
                at = self.stage, action.lane.value, action.op.value, action.layer
                self.events.append(
                    Event(*at, number if action.micro_batch >= 0 else -1, start, end)
                )

    def _received(self, message: Message) -> Generator[None, None, float]:
        """When the message has arrived."""
        while message not in self.mail:
            self.waiting = message
            yield
        return self.mail.pop(message)


def run(ranks: Sequence[Rank]) -> None:
    """Play every rank until it ended or begins a round. Raises VerificationError at a deadlock."""
    moving = True
    while moving:
        moving = False
        for rank in ranks:
            moving |= not rank.at_round and rank.resume()
    stuck = [rank.stage for rank in ranks if not rank.ended and not rank.at_round]
    if stuck:
        raise VerificationError(f"stages {stuck} wait for messages that are never sent")


def ranks_of(
    programs: Sequence[Program],
    graph: Graph,
    costs: Costs,
    events: list[Event] | None = None,
    *,
    traced: bool = False,
) -> list[Rank]:
    """A rank per program, at the start of its step; events are added to `events`."""
    mail: Mail = {}
    ranks = [_rank(program, (graph, costs), mail) for program in programs]
    for rank in ranks:
        rank.events, rank.traced = events, traced
    return ranks


def _rank(program: Program, prices: tuple[Graph, Costs], mail: Mail) -> Rank:
    first, rings = 0, dict[str, _Ring]()
    for name, buffer in program.buffers.items():
        within = (rings[buffer.within].first,) if buffer.within else ()
        rings[name] = _Ring(first, buffer.count, buffer.shares, within)
        first += buffer.count * max(1, len(buffer.shares))
    priced: dict[int, Step] = {}

    def step(action: Action) -> Step:
        found = priced.get(id(action))
        if found is None:
            found = priced[id(action)] = _step(action, rings, action_seconds(action, *prices))
        return found

    segments: list[Segment] = []
    for instruction in program.step:
        if isinstance(instruction, Repeat):
            body = [(step(action), number) for action, number in walk(instruction.body)]
            segments.append(Segment(instruction.count, instruction.stride, body))
        else:
            if not segments or segments[-1].count > 1:
                segments.append(Segment(1, 0, []))
            once = _step(instruction, rings, action_seconds(instruction, *prices))
            segments[-1].steps.append((once, instruction.micro_batch))
    return Rank(
        stage=program.stage,
        segments=segments,
        mail=mail,
        links=_links(segments),
        clocks=[0.0] * (len(LANES) + 1),
        written=[0.0] * first,
        used=[0.0] * first,
    )


def _links(segments: Sequence[Segment]) -> dict[int, Link]:
    """The links that several of the lanes use."""
    lanes = {step[0] for segment in segments for step, _ in segment.steps}
    shared: dict[int, Link] = {}
    for lane, other in LINKS.items():
        if LANES[lane] in lanes:
            shared[LANES[lane]] = shared.setdefault(LANES[other], Link())
    return shared


def _step(action: Action, rings: dict[str, _Ring], seconds: float) -> Step:
    reads, moving_reads = _places(action.reads, rings)
    changes, moving_changes = _places(action.writes + action.frees, rings)
    message = None
    if action.op in (Op.SEND, Op.RECV):
        message = (action.reads if action.op is Op.SEND else action.writes)[0].content
    return (
        LANES[action.lane],
        seconds,
        reads,
        moving_reads,
        changes,
        moving_changes,
        message,
        action,
    )


def _places(
    refs: tuple[Ref, ...], rings: dict[str, _Ring]
) -> tuple[tuple[int, ...], tuple[Moving, ...]]:
    """Entries of refs that stay, and the rings of those that follow the micro-batch."""
    if not refs:
        return (), ()
    if len(refs) == 1 and not refs[0].moving:  # as most are
        return tuple(rings[refs[0].buffer].entries(refs[0])), ()
    fixed, moving = list[int](), []
    for ref in refs:
        ring = rings[ref.buffer]
        if ref.moving:
            moving.append((ring.first, ref.entry, ring.length))
            fixed += ring.within
        else:
            fixed += ring.entries(ref)
    return tuple(fixed), tuple(moving)
