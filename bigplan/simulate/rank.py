"""Ranks on their way through their programs.

The order is the runtime's (bigplan/order.py), kept as times instead of action numbers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from bigplan.content import Content
from bigplan.cost import Costs
from bigplan.errors import VerificationError
from bigplan.graph.graph import Graph
from bigplan.order import EntryPlaces, TimeWaits, Uses
from bigplan.program import LINKS, Action, Lane, Op, Program, Repeat, walk
from bigplan.simulate.link import BusyLink
from bigplan.simulate.moment import Moment
from bigplan.simulate.seconds import Prices
from bigplan.timeline import Event

Step = tuple[int, Uses, Content | None, Action]  # lane, uses, content of a message
Message = tuple[Content, int]  # of a micro-batch
Mail = dict[Message, float]  # when it has arrived
LANES = {lane: index for index, lane in enumerate(Lane)}


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps, each with its micro-batch and seconds on its lane, `count` times.

    Micro-batches advance by `stride` each time.
    """

    count: int
    stride: int
    steps: list[tuple[Step, int, float]]

    def priced(self, prices: Prices) -> Segment:
        """The same steps at these prices."""
        steps = [(step, number, prices.seconds(step[-1])) for step, number, _ in self.steps]
        return Segment(self.count, self.stride, steps)


@dataclass(slots=True)
class Rank:
    """One role on its way through its program."""

    stage: int
    segments: list[Segment]
    waits: TimeWaits
    mail: Mail  # shared by all ranks; what was received is taken out
    events: list[Event] | None = None
    traced: bool = False  # times are moments, which know their cause
    main: int | None = None  # the segment that is played in rounds
    links: dict[int, BusyLink] = field(default_factory=dict)  # by lane that shares its link
    clocks: list[float] = field(default_factory=list)  # by lane
    repetition: int = 0  # of the segment that is being played
    waiting: Message | None = None  # the message it waits for
    at_round: bool = False
    ended: bool = False
    playing: Iterator[None] = field(init=False)

    def __post_init__(self) -> None:
        self.playing = self._play()

    def clock(self, lane: int) -> float:
        """When a lane, and the link that it may share, has done all that it was given."""
        link = self.links.get(lane)
        return self.clocks[lane] if link is None else max(self.clocks[lane], link.end)

    def resume(self) -> bool:
        """Go on until a message is missing or a round begins; False if nothing could go on."""
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
        clocks, waits, links = self.clocks, self.waits, self.links
        for step, offset, seconds in segment.steps:
            lane, uses, message, action = step
            number = base + offset
            reads, changes = uses.always or uses.at(number)
            ready = clocks[lane]
            if message and action.op is Op.RECV:
                ready = max(ready, (yield from self._received((message, number))))
            start = waits.begin(uses, reads, changes, ready)
            link = links.get(lane)
            end = start + seconds if link is None else link.take(start, seconds)
            clocks[lane] = end = Moment.of(end, action, start) if self.traced else end
            waits.end(reads, changes, end)
            if message and action.op is Op.SEND:
                self.mail[message, number] = end
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
    prices = Prices(graph, costs)
    ranks = [_rank(program, prices, mail) for program in programs]
    for rank in ranks:
        rank.events, rank.traced = events, traced
    return ranks


def priced_anew(ranks: Sequence[Rank], graph: Graph, costs: Costs) -> list[Rank]:
    """The ranks again at the start of their step, at other prices."""
    mail: Mail = {}
    prices = Prices(graph, costs)
    return [
        Rank(
            stage=rank.stage,
            segments=[segment.priced(prices) for segment in rank.segments],
            waits=TimeWaits(rank.waits.count, 0.0, max),
            mail=mail,
            links=_links(rank.segments),
            clocks=[0.0] * len(LANES),
        )
        for rank in ranks
    ]


def _rank(program: Program, prices: Prices, mail: Mail) -> Rank:
    places, segments = EntryPlaces(program.buffers), list[Segment]()
    known: dict[int, Step] = {}  # by an action's identity

    def priced(action: Action, number: int) -> tuple[Step, int, float]:
        if (step := known.get(id(action))) is None:
            step = known[id(action)] = _step(action, places)
        return step, number, prices.seconds(action)

    for instruction in program.step:
        if isinstance(instruction, Repeat):
            body = [priced(action, number) for action, number in walk(instruction.body)]
            segments.append(Segment(instruction.count, instruction.stride, body))
        else:
            if not segments or segments[-1].count > 1:
                segments.append(Segment(1, 0, []))
            segments[-1].steps.append(priced(instruction, instruction.micro_batch))
    return Rank(
        stage=program.stage,
        segments=segments,
        waits=TimeWaits(places.count, 0.0, max),
        mail=mail,
        links=_links(segments),
        clocks=[0.0] * len(LANES),
    )


def _links(segments: Sequence[Segment]) -> dict[int, BusyLink]:
    """The links that several of the lanes use."""
    lanes = {step[0] for segment in segments for step, *_ in segment.steps}
    shared: dict[int, BusyLink] = {}
    for lane, other in LINKS.items():
        if LANES[lane] in lanes:
            shared[LANES[lane]] = shared.setdefault(LANES[other], BusyLink())
    return shared


def _step(action: Action, places: EntryPlaces) -> Step:
    message = None
    if action.op in (Op.SEND, Op.RECV):
        message = (action.reads if action.op is Op.SEND else action.writes)[0].content
    return LANES[action.lane], places.uses(action), message, action
