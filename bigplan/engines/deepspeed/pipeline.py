"""A pipeline's step as DeepSpeed plays it: TrainSchedule's order, messages that both ends wait for.

Stage s of p takes micro-batch i forward in slot s + 2 i of its schedule and backward in slot
2 p - 1 - s + 2 i (0.19.8, runtime/pipe/schedule.py). A slot's result leaves at the beginning of the
next slot, beside what arrives then. Before a forward, gradients leave and hidden states arrive;
before a backward, gradients arrive and hidden states leave. Nothing computes meanwhile. A message
starts when both ends have come to it (runtime/pipe/p2p.py). After the last slot, gradients are
summed over stages that share a table and over data-parallel ranks. Then comes the update, which
begins when all stages know the norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from bigplan.cost.costs import Costs
from bigplan.engines.deepspeed.memory import StageHoldings
from bigplan.engines.deepspeed.price import Phase, PricedStep, StagePricing
from bigplan.program import Lane, Op
from bigplan.spec.cluster import NodeGroup
from bigplan.timeline import Event, Timeline

MANY = 16  # micro-batches, beside two for each stage, after which all further ones are alike


class PipelineTimes(NamedTuple):
    """Seconds of a stage: of a micro-batch, and after the last one."""

    forward: float
    backward: float  # with recomputation
    again: float  # part of the backward that recomputes
    leaves: tuple[Phase, ...]  # gradients' sum over data-parallel ranks, and their way off the GPU
    update: tuple[Phase, ...]


class StageEvent(NamedTuple):
    """What a stage did from `start` to `end`; until `begin` it waited for another stage."""

    stage: int
    lane: Lane
    op: Op
    kind: Op  # of a message: the op whose result it carries
    micro_batch: int
    start: float
    begin: float
    end: float
    cause: StageEvent | None  # the event whose end is `begin`


class Todo(NamedTuple):
    """What a stage does next; for a message, the stage at its other end."""

    op: Op
    micro_batch: int
    kind: Op = Op.FORWARD  # of a message: the op whose result it carries
    peer: int = -1


@dataclass(frozen=True, slots=True)
class PipedStep:
    """A steady step of all stages, with the same properties as PricedStep."""

    stages: tuple[PipelineTimes, ...]
    micro_batches: int
    message: float  # seconds
    nbytes: int  # of a message
    table: float  # seconds of a shared table's sum over the ends of the pipeline

    @property
    def seconds(self) -> float:
        """Seconds of the step; of many micro-batches those in the middle are alike."""
        few = 2 * len(self.stages) + MANY
        if self.micro_batches <= few:
            return _end(self._played(self.micro_batches))
        some, fewer = _end(self._played(few)), _end(self._played(few - MANY))
        return some + (self.micro_batches - few) * (some - fewer) / MANY

    def _played(self, micro_batches: int) -> tuple[StageEvent, ...]:
        return played(self.stages, micro_batches, self.message, self.table)

    @property
    def _all(self) -> tuple[StageEvent, ...]:
        return self._played(self.micro_batches)

    def by_lane(self) -> dict[str, float]:
        """Seconds of each lane on the chain of waits that leads to the end."""
        found: dict[str, float] = {}
        last: StageEvent | None = max(self._all, key=lambda done: done.end)
        while last is not None:
            found[last.lane] = found.get(last.lane, 0.0) + last.end - last.begin
            last = last.cause
        return {str(lane): seconds for lane, seconds in found.items() if seconds}

    def busy(self) -> dict[str, float]:
        """Seconds of each lane in the stage where that lane has most to do."""
        each = [self._of_stage(stage) for stage in range(len(self.stages))]
        lanes = dict.fromkeys(lane for lanes in each for lane in lanes)
        return {str(lane): max(one.get(lane, 0.0) for one in each) for lane in lanes}

    def on_busiest(self) -> dict[str, float]:
        """Seconds of each lane of the stage that computes most; the other lanes wait for it."""
        return max(
            (self._of_stage(stage) for stage in range(len(self.stages))),
            key=lambda lanes: lanes.get(Lane.COMPUTE, 0.0),
        )

    def _of_stage(self, stage: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for done in self._all:
            if done.stage == stage and done.end > done.begin:
                found[done.lane] = found.get(done.lane, 0.0) + done.end - done.begin
        return found

    @property
    def again(self) -> float:
        """Seconds of recomputation on the stage that computes most."""
        busiest = max(self.stages, key=lambda stage: stage.forward + stage.backward)
        return self.micro_batches * busiest.again

    def by_op(self) -> dict[str, float]:
        """Seconds of each kind of action, over all stages."""
        found: dict[str, float] = {}
        for done in self._all:
            found[done.op] = found.get(done.op, 0.0) + done.end - done.begin
        return {str(op): seconds for op, seconds in found.items()}

    def moved(self) -> dict[str, int]:
        """Bytes through each link, of the stage that moves most, which lies between two others."""
        ways = min(2, len(self.stages) - 1)
        messages = ways * self.micro_batches * self.nbytes
        found = {str(Lane.RECV): messages, str(Lane.SEND): messages}
        for times in self.stages:
            for lane, nbytes in PricedStep((*times.leaves, *times.update)).moved().items():
                found[lane] = max(found.get(lane, 0), nbytes)
        return dict(sorted(found.items()))

    def timeline(self) -> Timeline:
        """The grain that the worker measures; a message includes the wait for its other end."""
        found: dict[tuple[int, Op, Op, int], Event] = {}
        for done in self._all:
            key = done.stage, done.op, done.kind, done.micro_batch
            one = Event(done.stage, done.lane, done.op, 0, done.micro_batch, done.start, done.end)
            before = found.get(key, one)  # an update's phases are one event
            found[key] = before._replace(end=done.end)
        return Timeline(tuple(found.values()), _end(self._all))


def piped(every: Sequence[StageHoldings], costs: Costs, nodes: NodeGroup) -> PipedStep:
    """A steady step of a pipeline; `every`: its stages, first to last."""
    graph, stages = every[0].graph, list[PipelineTimes]()
    for held in every:
        pricing = StagePricing(held, costs, nodes)
        forward, backward, again = pricing.compute()
        after = tuple(pricing.sums()), tuple(pricing.update())
        stages.append(PipelineTimes(forward, backward + again, again, *after))
    nbytes = graph.kinds["block"].boundary
    _, table = costs.table
    return PipedStep(tuple(stages), graph.micro_batches, costs.send, nbytes, table)


def _end(every: Sequence[StageEvent]) -> float:
    return max(done.end for done in every)


def order(stage: int, stages: int, micro_batches: int) -> Iterator[Todo]:
    """The order of a stage's work up to its last slot."""

    def forward(slot: int) -> int:
        """The micro-batch of a slot, or -1."""
        number, odd = divmod(slot - stage, 2)
        return number if not odd and 0 <= number < micro_batches else -1

    def backward(slot: int) -> int:
        number, odd = divmod(slot - (2 * stages - 1 - stage), 2)
        return number if not odd and 0 <= number < micro_batches else -1

    before, after = stage - 1, stage + 1
    for slot in range(2 * (micro_batches + stages - 1)):
        if (slot - stage) % 2 == 0:
            if stage and (gone := backward(slot - 1)) >= 0:
                yield Todo(Op.SEND, gone, Op.BACKWARD, before)
            if (number := forward(slot)) >= 0:
                if stage:
                    yield Todo(Op.RECV, number, Op.FORWARD, before)
                yield Todo(Op.FORWARD, number)
            continue
        if (number := backward(slot)) >= 0 and after < stages:
            yield Todo(Op.RECV, number, Op.BACKWARD, after)
        if after < stages and (gone := forward(slot - 1)) >= 0:
            yield Todo(Op.SEND, gone, Op.FORWARD, after)
        if number >= 0:
            yield Todo(Op.BACKWARD, number)


_MESSAGES = {Op.SEND: Lane.SEND, Op.RECV: Lane.RECV}


class _PlayedStage:
    """A stage while the schedule is played."""

    def __init__(self, number: int, todo: Iterator[Todo], seconds: Mapping[Op, float]) -> None:
        self.number, self._todo, self._seconds = number, todo, seconds
        self.last: StageEvent | None = None
        self.next = next(todo, None)

    @property
    def now(self) -> float:
        return self.last.end if self.last else 0.0

    def compute(self) -> Iterator[StageEvent]:
        """Go on to the next message."""
        while self.next is not None and self.next.op not in _MESSAGES:
            yield self.take(Lane.COMPUTE, self._seconds[self.next.op])

    def take(self, lane: Lane, seconds: float, after: StageEvent | None = None) -> StageEvent:
        """Do what is next, once `after` has ended."""
        assert self.next is not None
        done = self.do(lane, self.next, seconds, after)
        self.next = next(self._todo, None)
        return done

    def do(
        self, lane: Lane, todo: Todo, seconds: float, after: StageEvent | None = None
    ) -> StageEvent:
        """Do something other than the next item."""
        waits = after is not None and after.end > self.now
        cause = after if waits else self.last
        begin = cause.end if cause else 0.0
        op, number, kind, _ = todo
        end = begin + seconds
        self.last = StageEvent(self.number, lane, op, kind, number, self.now, begin, end, cause)
        return self.last


@lru_cache(maxsize=64)
def played(
    stages: tuple[PipelineTimes, ...], micro_batches: int, message: float, table: float
) -> tuple[StageEvent, ...]:
    """A step of all stages. A message begins when both ends have come to it."""
    running = [
        _PlayedStage(
            number,
            order(number, len(stages), micro_batches),
            {Op.FORWARD: times.forward, Op.BACKWARD: times.backward},
        )
        for number, times in enumerate(stages)
    ]
    done = [each for one in running for each in one.compute()]
    while any(one.next for one in running):
        before = len(done)
        for one in running[:-1]:
            other = running[one.number + 1]
            if _meet(one.next, other.next, one.number):
                ends = one.last, other.last
                for each, after in ((one, ends[1]), (other, ends[0])):
                    assert each.next is not None
                    done.append(each.take(_MESSAGES[each.next.op], message, after))
                    done.extend(each.compute())
        assert len(done) > before, "stages wait for each other in a circle"
    done.extend(_ended(running, stages, table))
    return tuple(done)


def _meet(one: Todo | None, other: Todo | None, number: int) -> bool:
    """Whether stage `number` and the one behind it are at the two ends of a message."""
    if one is None or other is None or {one.op, other.op} != {Op.SEND, Op.RECV}:
        return False
    same = (one.micro_batch, one.kind) == (other.micro_batch, other.kind)
    return same and one.peer == number + 1 and other.peer == number


def _ended(
    running: list[_PlayedStage], stages: tuple[PipelineTimes, ...], table: float
) -> Iterator[StageEvent]:
    """The work after the last slot."""
    if table:
        first, last = running[0], running[-1]
        ends = first.last, last.last
        yield first.do(Lane.COMM, Todo(Op.TENSOR_REDUCE, 0), table, ends[1])
        yield last.do(Lane.COMM, Todo(Op.TENSOR_REDUCE, 0), table, ends[0])
    for one, times in zip(running, stages, strict=True):
        for phase in times.leaves:
            yield one.do(phase.lane, Todo(phase.op, 0), phase.seconds)
    latest = max((one.last for one in running), key=lambda done: done.end if done else 0.0)
    for one, times in zip(running, stages, strict=True):
        after = latest
        for phase in times.update:
            yield one.do(phase.lane, Todo(phase.op, 0), phase.seconds, after)
            after = None
