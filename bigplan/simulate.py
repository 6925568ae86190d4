"""The program priced and played: when every action of a step starts and ends.

Lanes run their actions in program order; an action starts when its lane is free and the actions it
depends on have ended. Nothing here knows how the solver estimated the plan.

The order is `program.Dependencies`' order, kept as times instead of action numbers: an entry knows
when it was last written and when it was last used. `step_seconds` plays a steady block only until
every clock advances by the same time per repetition; from then on so does every later repetition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bigplan.cost import Costs
from bigplan.errors import VerificationError
from bigplan.graph.graph import Graph
from bigplan.placement import Tier
from bigplan.program import Action, Lane, Op, Program, Ref, Repeat, counted, walk
from bigplan.timeline import Event, Timeline

MOVES = {
    Lane.H2D: "h2d",
    Lane.D2H: "d2h",
    Lane.NVME_READ: "nvme_read",
    Lane.NVME_WRITE: "nvme_write",
}
SAME = 1e-9  # two shifts this close, relative to the shift, are equal
ROUNDS = 8  # fewer repetitions are played one by one


def action_seconds(action: Action, graph: Graph, costs: Costs) -> float:
    """Seconds an action holds its lane."""
    rates, kind = costs.rates, costs.kinds[graph.layers[action.layer]]
    if action.lane in MOVES:
        return rates.latency + action.amount / float(getattr(rates, MOVES[action.lane]))
    on_gpu = action.lane is Lane.COMPUTE
    memory = rates.device_memory if on_gpu else rates.host_memory
    seconds = 0.0
    match action.op:
        case Op.FORWARD:
            seconds = kind.forward
        case Op.BACKWARD:
            seconds = kind.backward + (kind.forward if action.recompute else 0.0)
        case Op.UPDATE:
            rate = rates.gpu_update if action.piece is Tier.GPU else rates.cpu_update
            seconds = action.amount / rate
        case Op.ACCUMULATE:
            seconds = 3 * action.amount / memory  # read both, write the sum
        case Op.NORM:
            seconds = action.amount / memory
        case Op.REDUCE:
            seconds = kind.reduce
        case Op.GATHER:
            seconds = kind.gather
        case Op.SEND:
            seconds = costs.send
    return seconds


def simulate(programs: Sequence[Program], graph: Graph, costs: Costs) -> Timeline:
    """One steady step of every stage, messages between neighbours matched.

    Raises VerificationError where stages wait for each other for ever.
    """
    events: list[Event] = []
    _run(_ranks(programs, graph, costs, events))
    return Timeline(tuple(events), max((event.end for event in events), default=0.0))


def step_seconds(programs: Sequence[Program], graph: Graph, costs: Costs) -> float:
    """The seconds of `simulate`'s timeline, up to rounding, without its events.

    Raises VerificationError where stages wait for each other for ever.
    """
    ranks = _ranks(programs, graph, costs, None)
    mains = [_main_segment(rank) for rank in ranks]
    if all(main is not None for main in mains):
        for rank, main in zip(ranks, mains, strict=True):
            rank.main = main
        _run_rounds(ranks)
        for rank in ranks:
            rank.main, rank.at_round = None, False
    _run(ranks)
    return max((clock for rank in ranks for clock in rank.clocks), default=0.0)


def busy_seconds(programs: Sequence[Program], graph: Graph, costs: Costs) -> dict[str, float]:
    """The busiest stage's seconds per lane, as `Timeline.busy` adds them up."""
    worst: dict[str, float] = {}
    for program in programs:
        alone: dict[str, float] = {}
        for action, times in counted(program.step):
            if action.op is not Op.FREE:
                seconds = times * action_seconds(action, graph, costs)
                alone[action.lane.value] = alone.get(action.lane.value, 0.0) + seconds
        worst.update({k: v for k, v in alone.items() if v > worst.get(k, -1.0)})
    return worst


Moving = tuple[int, int, int]  # a ring's first entry, its entry for micro-batch 0, its entries
# Lane, seconds; entries read and changed, fixed and moving; content of a message; the action.
_Step = tuple[
    int,
    float,
    tuple[int, ...],
    tuple[Moving, ...],
    tuple[int, ...],
    tuple[Moving, ...],
    str,
    Action,
]
_Mail = dict[tuple[str, int], float]  # when a message of a micro-batch has arrived
LANES = {lane: index for index, lane in enumerate(Lane)}


@dataclass(frozen=True, slots=True)
class _Segment:
    """Steps, each with its micro-batch, `count` times; micro-batches advance by `stride`."""

    count: int
    stride: int
    steps: list[tuple[_Step, int]]


@dataclass(slots=True)
class _Rank:
    """One role on its way through its program."""

    stage: int
    segments: list[_Segment]
    rings: list[tuple[int, int]]  # first entry and number of entries
    mail: _Mail  # shared by all ranks; what was received is taken out
    events: list[Event] | None
    main: int | None = None  # the segment that is played in rounds
    clocks: list[float] = field(default_factory=list)  # by lane
    written: list[float] = field(default_factory=list)  # by entry: end of the last write
    used: list[float] = field(default_factory=list)  # by entry: end of the last read or write
    repetition: int = 0  # of the segment that is being played
    waiting: tuple[str, int] | None = None  # for this message
    at_round: bool = False
    ended: bool = False
    playing: Iterator[None] = field(init=False)

    def __post_init__(self) -> None:
        self.playing = self._play()

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

    def _repeat(self, segment: _Segment, base: int) -> Iterator[None]:
        clocks, written, used, mail = self.clocks, self.written, self.used, self.mail
        for step, offset in segment.steps:
            lane, seconds, reads, moving_reads, changes, moving_changes, message, action = step
            number = base + offset
            if moving_reads:
                reads = (*reads, *[first + (i + number) % n for first, i, n in moving_reads])
            if moving_changes:
                changes = (*changes, *[first + (i + number) % n for first, i, n in moving_changes])
            start = clocks[lane]
            if message and action.op is Op.RECV:
                while (message, number) not in mail:
                    self.waiting = message, number
                    yield
                start = max(start, mail.pop((message, number)))
            for entry in reads:
                start = max(start, written[entry])
            for entry in changes:
                start = max(start, used[entry])
            clocks[lane] = end = start + seconds
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


def _run(ranks: Sequence[_Rank]) -> None:
    """Play every rank until it ended or begins a round. Raises VerificationError at a deadlock."""
    moving = True
    while moving:
        moving = False
        for rank in ranks:
            moving |= not rank.at_round and rank.resume()
    stuck = [rank.stage for rank in ranks if not rank.ended and not rank.at_round]
    if stuck:
        raise VerificationError(f"stages {stuck} wait for messages that are never sent")


def _ranks(
    programs: Sequence[Program], graph: Graph, costs: Costs, events: list[Event] | None
) -> list[_Rank]:
    mail: _Mail = {}
    return [_rank(program, (graph, costs), mail, events) for program in programs]


def _rank(
    program: Program, prices: tuple[Graph, Costs], mail: _Mail, events: list[Event] | None
) -> _Rank:
    first, rings = 0, {}
    for name, buffer in program.buffers.items():
        rings[name] = first, buffer.count
        first += buffer.count
    priced: dict[int, _Step] = {}

    def steps(instructions: Iterable[tuple[Action, int]]) -> list[tuple[_Step, int]]:
        found = []
        for action, number in instructions:
            if id(action) not in priced:
                priced[id(action)] = _step(action, rings, action_seconds(action, *prices))
            found.append((priced[id(action)], number))
        return found

    segments = []
    for instruction in program.step:
        if isinstance(instruction, Repeat):
            body = steps(walk(instruction.body))
            segments.append(_Segment(instruction.count, instruction.stride, body))
        else:
            segments.append(_Segment(1, 0, steps([(instruction, instruction.micro_batch)])))
    return _Rank(
        stage=program.stage,
        segments=segments,
        rings=list(rings.values()),
        mail=mail,
        events=events,
        clocks=[0.0] * len(LANES),
        written=[0.0] * first,
        used=[0.0] * first,
    )


def _step(action: Action, rings: dict[str, tuple[int, int]], seconds: float) -> _Step:
    changes = action.writes + action.frees
    message = ""
    if action.op in (Op.SEND, Op.RECV):
        message = (action.reads if action.op is Op.SEND else action.writes)[0].content
    return (
        LANES[action.lane],
        seconds,
        _fixed(action.reads, rings),
        _moving(action.reads, rings),
        _fixed(changes, rings),
        _moving(changes, rings),
        message,
        action,
    )


def _fixed(refs: tuple[Ref, ...], rings: dict[str, tuple[int, int]]) -> tuple[int, ...]:
    places = [(*rings[ref.buffer], ref.entry) for ref in refs if not ref.moving]
    return tuple(first + entry % count for first, count, entry in places)


def _moving(refs: tuple[Ref, ...], rings: dict[str, tuple[int, int]]) -> tuple[Moving, ...]:
    places = [(*rings[ref.buffer], ref.entry) for ref in refs if ref.moving]
    return tuple((first, entry, count) for first, count, entry in places)


def _main_segment(rank: _Rank) -> int | None:
    """The repeated forward and backward passes, if there are enough of them to be worth it."""
    sizes = [segment.count * len(segment.steps) for segment in rank.segments]
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    ops = {step[-1].op for step, _ in rank.segments[longest].steps}
    enough = rank.segments[longest].count >= ROUNDS
    return longest if enough and ops >= {Op.FORWARD, Op.BACKWARD} else None


@dataclass(frozen=True, slots=True)
class _Steady:
    """What a repetition of a rank's main segment uses; `pairs`: where an entry's role goes next."""

    rank: _Rank
    stride: int
    lanes: list[int]
    written: list[int]
    used: list[int]
    ring: dict[int, tuple[int, int]]  # by entry of a ring that moves

    @classmethod
    def of(cls, rank: _Rank) -> _Steady:
        """The lanes and entries that the main segment's steps name."""
        assert rank.main is not None
        segment = rank.segments[rank.main]
        steps = [step for step, _ in segment.steps]
        moving = {(a, n) for step in steps for a, _, n in (*step[3], *step[5])}
        ring = {a + i: (a, n) for a, n in moving for i in range(n)}
        changed = {e for step in steps for e in step[4]} | set(ring)
        return cls(
            rank,
            segment.stride,
            sorted({step[0] for step in steps}),
            sorted(changed),
            sorted(changed | {e for step in steps for e in step[2]}),
            ring,
        )

    def moved(self, entry: int, rounds: int) -> int:
        """The entry that plays `entry`'s part so many rounds later."""
        if entry not in self.ring:
            return entry
        first, count = self.ring[entry]
        return first + (entry - first + rounds * self.stride) % count

    def times(self, rounds: int) -> list[float]:
        """All times that the coming repetitions depend on, in an order that follows the roles."""
        rank = self.rank
        return [
            *[rank.clocks[lane] for lane in self.lanes],
            *[rank.written[self.moved(entry, rounds)] for entry in self.written],
            *[rank.used[self.moved(entry, rounds)] for entry in self.used],
        ]

    def skip(self, rounds: int, seconds: float) -> None:
        """Let so many repetitions pass, which together advance every time by `seconds`."""
        rank = self.rank
        written, used = rank.written[:], rank.used[:]
        for lane in self.lanes:
            rank.clocks[lane] += seconds
        for entry in self.written:
            rank.written[self.moved(entry, rounds)] = written[entry] + seconds
        for entry in self.used:
            rank.used[self.moved(entry, rounds)] = used[entry] + seconds
        rank.repetition += rounds


def _run_rounds(ranks: list[_Rank]) -> None:
    """Play one repetition of every main segment at a time; skip those that repeat the last one.

    A repetition maps times to times by sums and maxima, so it commutes with adding a constant to
    all of them. Two equal advances in a row show that no time from outside the block matters any
    more; from then on every repetition advances every time by the same.
    """
    _run(ranks)
    every = [_Steady.of(rank) for rank in ranks]
    count = min(rank.segments[rank.main or 0].count for rank in ranks)
    mail, stride = ranks[0].mail, every[0].stride
    if any(steady.stride != stride for steady in every):
        return
    last: tuple[list[tuple[str, int]], list[float]] | None = None
    last_shift = None
    for done in range(count - 1):
        letters = sorted((content, number - done * stride) for content, number in mail)
        times = [mail[content, number + done * stride] for content, number in letters]
        now = letters, [*times, *(t for steady in every for t in steady.times(done))]
        shift = _shift(last, now)
        if shift is not None and last_shift is not None and abs(shift - last_shift) <= SAME * shift:
            _skip(every, mail, count - 1 - done, shift)
            return
        last, last_shift = now, shift
        for rank in ranks:
            rank.at_round = False
        _run(ranks)


def _shift(
    last: tuple[list[tuple[str, int]], list[float]] | None,
    now: tuple[list[tuple[str, int]], list[float]],
) -> float | None:
    """By how much every time has advanced; None where not all by the same."""
    if last is None or last[0] != now[0]:
        return None
    shift = now[1][-1] - last[1][-1]
    same = all(abs(b - a - shift) <= SAME * shift for a, b in zip(last[1], now[1], strict=True))
    return shift if same and shift > 0 else None


def _skip(every: list[_Steady], mail: _Mail, rounds: int, shift: float) -> None:
    for steady in every:
        steady.skip(rounds, rounds * shift)
    moved = {(c, n + rounds * every[0].stride): t + rounds * shift for (c, n), t in mail.items()}
    mail.clear()
    mail.update(moved)
