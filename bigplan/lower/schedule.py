"""Pipeline schedules: a stage's passes in order, steady parts as repeat blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigplan.graph.graph import Graph
from bigplan.lower.layout import StageLayout
from bigplan.lower.passes import Emitter
from bigplan.lower.unit import AccumulationGroup
from bigplan.program import Instruction, Repeat


def one_forward_one_backward(layout: StageLayout, emitter: Emitter) -> Iterator[Instruction]:
    """1F1B over units: fill the stages after this one, alternate, drain."""
    units = layout.graph.units
    group = layout.graph.strategy.accumulation_group
    fill = layout.graph.in_flight_units(layout.position.stage)
    pairs, drain = units - fill, fill - 1

    yield from emitter.forward(AccumulationGroup(0, first=True, last=units == 1))
    yield from _repeat(fill - 1, group, emitter.forward(AccumulationGroup(group)))
    yield from emitter.backward(AccumulationGroup(0, first=True, last=units == 1))
    whole = pairs - 1 if drain == 0 and pairs > 0 else pairs
    if whole > 0:
        pair = [
            *emitter.forward(AccumulationGroup(fill * group)),
            *emitter.backward(AccumulationGroup(group)),
        ]
        yield from _repeat(whole, group, iter(pair))
    if whole < pairs:
        yield from emitter.forward(AccumulationGroup((units - 1) * group, last=True))
        yield from emitter.backward(AccumulationGroup((units - 1) * group, last=True))
    if drain > 0:
        if drain > 1:
            yield from _repeat(
                drain - 1, group, emitter.backward(AccumulationGroup((pairs + 1) * group))
            )
        yield from emitter.backward(AccumulationGroup((units - 1) * group, last=True))


def forward_only(layout: StageLayout, emitter: Emitter) -> Iterator[Instruction]:
    """Every unit through the stage's chunks in turn; from the second unit on slots are alike."""
    group, turns = layout.graph.strategy.accumulation_group, range(layout.graph.strategy.vpp)
    for turn in turns:
        yield from emitter.forward(AccumulationGroup(0, turn))
    rest = [action for turn in turns for action in emitter.forward(AccumulationGroup(group, turn))]
    yield from _repeat(layout.graph.units - 1, group, iter(rest))


def _repeat(count: int, stride: int, body: Iterator[Instruction]) -> Iterator[Instruction]:
    if count > 0:
        yield Repeat(count, stride, tuple(body))


@dataclass(frozen=True, slots=True)
class _Order:
    """Interleaved passes of one stage: which chunk and micro-batch comes when.

    The order is Megatron-LM's. Forward passes take as many micro-batches of a chunk as there are
    stages, then as many of the next chunk. Backward passes take the chunks in reverse.
    """

    graph: Graph

    @property
    def total(self) -> int:
        """Passes each way in a step."""
        return self.graph.units * self.graph.strategy.vpp

    @property
    def period(self) -> int:
        """Passes after which the chunks come in the same order again."""
        return self.graph.strategy.pp * self.graph.strategy.vpp

    def forward(self, index: int) -> AccumulationGroup:
        """The forward pass with this index."""
        return self._unit(index, (index % self.period) // self.graph.strategy.pp)

    def backward(self, index: int) -> AccumulationGroup:
        """The backward pass with this index."""
        before = (index % self.period) // self.graph.strategy.pp
        return self._unit(index, self.graph.strategy.vpp - 1 - before)

    def _unit(self, index: int, turn: int) -> AccumulationGroup:
        stages = self.graph.strategy.pp
        base = index // self.period * stages + index % stages
        return AccumulationGroup(base, turn, first=base == 0, last=base == self.graph.units - 1)


PassPair = tuple[
    AccumulationGroup | None, AccumulationGroup | None
]  # a forward and the backward after it


def interleaved(layout: StageLayout, emitter: Emitter) -> Iterator[Instruction]:
    """1F1B over chunks: warm up, alternate, drain; whole periods between as one block."""
    order, warm_up = _Order(layout.graph), layout.graph.warm_up(layout.position.stage)
    total, period = order.total, order.period
    pairs: list[PassPair] = [
        (order.forward(warm_up + i), order.backward(i))
        for i in range(min(total - warm_up, 2 * period))
    ]
    # A period may repeat if it holds neither the first nor the last pass of a chunk in a step.
    middle = max(0, total - warm_up - 2 * period) // period
    yield from _runs([(order.forward(i), None) for i in range(warm_up)], emitter)
    if middle == 0:
        pairs = [(order.forward(warm_up + i), order.backward(i)) for i in range(total - warm_up)]
        yield from _runs(pairs, emitter)
    else:
        yield from _runs(pairs[:period], emitter)
        block = tuple(_runs(pairs[period:], emitter))
        yield Repeat(middle, layout.graph.strategy.pp, block)
        rest = range(period * (1 + middle), total - warm_up)
        yield from _runs([(order.forward(warm_up + i), order.backward(i)) for i in rest], emitter)
    drain = range(total - warm_up, total)
    yield from _runs([(None, order.backward(i)) for i in drain], emitter)


def _runs(passes: list[PassPair], emitter: Emitter) -> Iterator[Instruction]:
    """The passes; those that differ in their micro-batch alone become a block."""
    start = 0
    while start < len(passes):
        stop = start + 1
        while stop < len(passes) and _follows(passes[start], passes[stop], stop - start):
            stop += 1
        forward, backward = passes[start]
        body = [
            *(emitter.forward(forward) if forward else ()),
            *(emitter.backward(backward) if backward else ()),
        ]
        yield from _repeat(stop - start, 1, iter(body))
        start = stop


def _follows(one: PassPair, other: PassPair, by: int) -> bool:
    """Whether `other` is `one`, `by` micro-batches later."""
    for a, b in zip(one, other, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif b.base != a.base + by or b[1:] != a[1:]:
            return False
    return True
