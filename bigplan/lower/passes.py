"""Forward and backward of one accumulation group on one stage, as actions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bigplan.lower import micro_batch
from bigplan.lower.gradients import gradient_home
from bigplan.lower.layout import Layout
from bigplan.lower.refs import Refs
from bigplan.lower.sizes import full_parameter_bytes, parameter_bytes
from bigplan.lower.unit import Unit
from bigplan.lower.update import update_layer
from bigplan.placement import Tier
from bigplan.program import Action, Instruction, Lane, Op, Ref, Repeat


@dataclass(slots=True)
class Emitter:
    """Emits a stage's passes in program order, tracking which layer each GPU slot holds."""

    layout: Layout
    deferred: bool  # this step starts with the previous step's updates
    held: dict[tuple[str, int], int] = field(default_factory=dict)
    updated: int = -1  # layers up to this one have had their pending update
    reduced: list[Action] = field(default_factory=list)  # what waits for the last reduction
    refs: Refs = field(init=False)

    def __post_init__(self) -> None:
        self.refs = Refs(self.layout)

    def forward(self, unit: Unit) -> Iterator[Instruction]:
        """All layers on all micro-batches of the unit; the last layer's backward included."""
        layers = list(self.layout.table)
        visiting = [layer for layer in layers if layer in self.layout.visiting]
        ahead = self.layout.slots
        if unit.first:
            self.updated = layers[0] - 1
        for layer in visiting[:ahead]:
            yield from self._bring(layer, unit)
        for layer in layers:
            yield from self._update_until(layer, unit)
            if self.layout.is_last and layer == layers[-1]:
                yield from self._loss(layer, unit)
            else:
                yield from self._forward_layer(layer, unit)
            if layer in visiting:
                for coming in visiting[visiting.index(layer) + ahead :][:1]:
                    yield from self._bring(coming, unit)

    def backward(self, unit: Unit) -> Iterator[Instruction]:
        """All layers in reverse on all micro-batches of the unit."""
        layers = list(self.layout.table)[::-1]
        if self.layout.is_last:
            layers = layers[1:]  # the last layer's backward followed its forward
        visiting = [layer for layer in layers if layer in self.layout.visiting]
        ahead = self.layout.slots
        for layer in visiting[:ahead]:
            yield from self._bring(layer, unit)
        for layer in layers:
            yield from self._backward_layer(layer, unit)
            if layer in visiting:
                for coming in visiting[visiting.index(layer) + ahead :][:1]:
                    yield from self._bring(coming, unit)
        yield from self._after_reduction([])

    def release(self) -> Iterator[Action]:
        """Empty every slot at the end of a step: the next update makes their content stale."""
        for layer in list(self.held.values()):
            yield from self._release(layer)

    def _release(self, layer: int) -> Iterator[Action]:
        key = (self.layout.graph.layers[layer], self.refs.weights(layer).entry)
        if self.held.get(key) == layer:
            del self.held[key]
            yield Action(Op.FREE, Lane.COMPUTE, layer, frees=(self.refs.weights(layer),))

    def _update_until(self, layer: int, unit: Unit) -> Iterator[Instruction]:
        if self.deferred and unit.first:
            for pending in range(self.updated + 1, layer + 1):
                yield from update_layer(self.layout, pending)
            self.updated = max(self.updated, layer)

    def _bring(self, layer: int, unit: Unit) -> Iterator[Instruction]:
        """Fill the layer's slot, unless it still holds the layer."""
        layout, slot = self.layout, self.refs.weights(layer)
        name = layout.graph.layers[layer]
        yield from self._update_until(layer, unit)
        occupant = self.held.get((name, slot.entry))
        if occupant == layer:
            return
        if occupant is not None:
            yield from self._release(occupant)
        self.held[name, slot.entry] = layer
        at, source = layout.table[layer].parameters, Ref(f"w{layer}", f"w{layer}")
        nbytes, sharded = parameter_bytes(layout, layer), layout.shards(layer, from_zero=3)
        if at is Tier.NVME:
            staged = Ref(f"stage.w.{name}", f"w{layer}", layout.turns["stage.w"][layer])
            yield Action(Op.READ, Lane.NVME_READ, layer, (source,), (staged,), amount=nbytes)
            source = staged
        if at is not Tier.GPU:
            target = slot
            if sharded:
                target = Ref(f"shard.{name}", f"w{layer}", slot.entry)
            yield Action(Op.LOAD, Lane.H2D, layer, (source,), (target,), amount=nbytes)
            source = target
        if sharded:
            full = full_parameter_bytes(layout, layer)
            yield Action(Op.GATHER, Lane.COMM, layer, (source,), (slot,), amount=full)

    def _each(self, body: list[Action], unit: Unit, *, skip: int = 0) -> Iterator[Instruction]:
        """`body`, written for the unit's first micro-batch, on those after the first `skip`."""
        count = self.layout.graph.strategy.accumulation_group - skip
        if count > 0:
            moved = [_at(action, unit.base + skip) for action in body]
            yield from moved if count == 1 else [Repeat(count, 1, tuple(moved))]

    def _forward_layer(self, layer: int, unit: Unit) -> Iterator[Instruction]:
        body = [
            *micro_batch.receive(self.refs, layer, forward=True),
            micro_batch.forward(self.refs, layer),
            *micro_batch.save(self.refs, layer),
            *micro_batch.send(self.refs, layer, forward=True),
        ]
        yield from self._each(body, unit)

    def _loss(self, layer: int, unit: Unit) -> Iterator[Instruction]:
        before = [
            *micro_batch.receive(self.refs, layer, forward=True),
            micro_batch.forward(self.refs, layer),
        ]
        yield from self._backward_and_gradients(layer, before, unit)

    def _backward_layer(self, layer: int, unit: Unit) -> Iterator[Instruction]:
        before = [
            *micro_batch.receive(self.refs, layer, forward=False),
            *micro_batch.fetch(self.refs, layer),
        ]
        yield from self._backward_and_gradients(layer, before, unit)

    def _backward_and_gradients(
        self, layer: int, before: list[Action], unit: Unit
    ) -> Iterator[Instruction]:
        yield from self._backward_each(
            layer, before, list(micro_batch.send(self.refs, layer, forward=False)), unit
        )
        rest = list(gradient_home(self.layout, layer, self.refs.gradient_sum(layer), unit))
        if unit.last and not self.layout.graph.clipped:
            yield from self._release(layer)  # the update makes the copy in the slot stale
            rest += update_layer(self.layout, layer)
        yield from self._after_reduction(rest)

    def _after_reduction(self, rest: list[Action]) -> Iterator[Action]:
        """What follows a reduction comes one layer later: the GPU computes while it is reduced.

        No later than that: the layer after the next needs this layer's entry of the sum ring.
        """
        reduction = [action for action in rest[:1] if action.op is Op.REDUCE]
        yield from reduction
        yield from self.reduced
        self.reduced = rest[1:] if reduction else []
        yield from () if reduction else rest

    def _backward_each(
        self, layer: int, before: list[Action], after: list[Action], unit: Unit
    ) -> Iterator[Instruction]:
        """Backward of every micro-batch; on a fresh gradient sum the first one writes it."""
        shared = self.layout.graph.tied and layer == 0  # the last layer wrote the sum already
        fresh = (unit.first or self.layout.sums_apart(layer)) and not shared
        own, *table = self.refs.sums(layer)  # the shared table's sum is at home: once a step
        if fresh:
            started = [] if unit.first else table
            start = [*before, micro_batch.backward(self.refs, layer, started), *after]
            yield from (_at(action, unit.base) for action in start)
        rest = [*before, micro_batch.backward(self.refs, layer, [own, *table]), *after]
        yield from self._each(rest, unit, skip=int(fresh))


def _at(action: Action, number: int) -> Action:
    return replace(action, micro_batch=number)
