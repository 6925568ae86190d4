"""Forward and backward of one accumulation group on one stage, as actions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bigplan.graph.graph import Recompute
from bigplan.lower.layout import STAGING, Layout
from bigplan.lower.gradients import gradient_home
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

    def release(self) -> Iterator[Action]:
        """Empty every slot at the end of a step: the next update makes their content stale."""
        for layer in list(self.held.values()):
            yield from self._release(layer)

    def _release(self, layer: int) -> Iterator[Action]:
        key = (self.layout.graph.layers[layer], self.weights(layer).entry)
        if self.held.get(key) == layer:
            del self.held[key]
            yield Action(Op.FREE, Lane.COMPUTE, layer, frees=(self.weights(layer),))

    def weights(self, layer: int) -> Ref:
        """Where compute finds the layer's parameters."""
        if not self.layout.visits(layer):
            return Ref(f"w{layer}", f"w{layer}")
        name = self.layout.graph.layers[layer]
        same = [v for v in self.layout.visiting if self.layout.graph.layers[v] == name]
        return Ref(f"slot.{name}", f"w{layer}", same.index(layer) % self.layout.ring(name))

    def gradient_sum(self, layer: int) -> Ref:
        """Where compute sums the unit's gradients."""
        if not self.layout.sums_apart(layer):
            return Ref(f"g{layer}", f"g{layer}")
        name = self.layout.graph.layers[layer]
        return Ref(f"sum.{name}", f"p{layer}", self.layout.positions[layer] % STAGING)

    def _update_until(self, layer: int, unit: Unit) -> Iterator[Instruction]:
        if self.deferred and unit.first:
            for pending in range(self.updated + 1, layer + 1):
                yield from update_layer(self.layout, pending)
            self.updated = max(self.updated, layer)

    def _bring(self, layer: int, unit: Unit) -> Iterator[Instruction]:
        """Fill the layer's slot, unless it still holds the layer."""
        layout, slot = self.layout, self.weights(layer)
        name = layout.graph.layers[layer]
        yield from self._update_until(layer, unit)
        occupant = self.held.get((name, slot.entry))
        if occupant == layer:
            return
        if occupant is not None:
            yield from self._release(occupant)
        self.held[name, slot.entry] = layer
        at, source = layout.table[layer].parameters, Ref(f"w{layer}", f"w{layer}")
        nbytes, sharded = layout.parameter_bytes(layer), layout.shards(layer, from_zero=3)
        if at is Tier.NVME:
            staged = Ref(f"stage.w.{name}", f"w{layer}", layout.positions[layer])
            yield Action(Op.READ, Lane.NVME_READ, layer, (source,), (staged,), amount=nbytes)
            source = staged
        if at is not Tier.GPU:
            target = slot
            if sharded:
                target = Ref(f"shard.{name}", f"w{layer}", slot.entry)
            yield Action(Op.LOAD, Lane.H2D, layer, (source,), (target,), amount=nbytes)
            source = target
        if sharded:
            full = layout.full_parameter_bytes(layer)
            yield Action(Op.GATHER, Lane.COMM, layer, (source,), (slot,), amount=full)

    def _each(self, body: list[Action], unit: Unit, *, skip: int = 0) -> Iterator[Instruction]:
        """`body`, written for the unit's first micro-batch, on those after the first `skip`."""
        count = self.layout.graph.strategy.accumulation_group - skip
        if count > 0:
            moved = [_at(action, unit.base + skip) for action in body]
            yield from moved if count == 1 else [Repeat(count, 1, tuple(moved))]

    def _forward_layer(self, layer: int, unit: Unit) -> Iterator[Instruction]:
        body = [
            *self._receive(layer, forward=True),
            self._forward_action(layer),
            *self._save(layer),
            *self._send(layer, forward=True),
        ]
        yield from self._each(body, unit)

    def _loss(self, layer: int, unit: Unit) -> Iterator[Instruction]:
        before = [*self._receive(layer, forward=True), self._forward_action(layer)]
        yield from self._backward_and_gradients(layer, before, unit)

    def _backward_layer(self, layer: int, unit: Unit) -> Iterator[Instruction]:
        before = [*self._receive(layer, forward=False), *self._fetch(layer)]
        yield from self._backward_and_gradients(layer, before, unit)

    def _backward_and_gradients(
        self, layer: int, before: list[Action], unit: Unit
    ) -> Iterator[Instruction]:
        yield from self._backward_each(layer, before, list(self._send(layer, forward=False)), unit)
        yield from gradient_home(self.layout, layer, self.gradient_sum(layer), unit)
        if unit.last and not self.layout.graph.clipped:
            yield from self._release(layer)  # the update makes the copy in the slot stale
            yield from update_layer(self.layout, layer)

    def _backward_each(
        self, layer: int, before: list[Action], after: list[Action], unit: Unit
    ) -> Iterator[Instruction]:
        """Backward of every micro-batch; on a fresh gradient sum the first one writes it."""
        shared = self.layout.graph.tied and layer == 0  # the last layer wrote the sum already
        fresh = (unit.first or self.layout.sums_apart(layer)) and not shared
        if fresh:
            start = [*before, self._backward_action(layer, fresh=True), *after]
            yield from (_at(action, unit.base) for action in start)
        rest = [*before, self._backward_action(layer, fresh=False), *after]
        yield from self._each(rest, unit, skip=int(fresh))

    def _forward_action(self, layer: int) -> Action:
        reads, writes = [*self._tables(layer)], [self._passing(layer)]
        if layer > 0:
            reads.append(_hidden("h", layer - 1))
        if layer < len(self.layout.graph.layers) - 1:
            writes.append(_hidden("h", layer))
        return Action(
            Op.FORWARD, Lane.COMPUTE, layer, tuple(reads), tuple(writes), micro_batch=0
        )

    def _backward_action(self, layer: int, *, fresh: bool) -> Action:
        layout, total = self.layout, self.gradient_sum(layer)
        kept, sums = self._passing(layer), [total]
        if self._reads_table(layer):
            sums.append(Ref("g0", "g0"))
        reads = [*self._tables(layer), kept, *(() if fresh else sums)]
        writes = list(sums)
        if layer < len(layout.graph.layers) - 1:
            reads.append(_hidden(layout.gradient_ring, layer, gradient=True))
        if layer > 0:
            writes.append(_hidden(layout.gradient_ring, layer - 1, gradient=True))
        return Action(
            Op.BACKWARD,
            Lane.COMPUTE,
            layer,
            tuple(reads),
            tuple(writes),
            frees=(kept,),
            micro_batch=0,
            recompute=layout.table[layer].recompute is Recompute.FULL,
        )

    def _reads_table(self, layer: int) -> bool:
        graph = self.layout.graph
        return graph.tied and layer == len(graph.layers) - 1

    def _tables(self, layer: int) -> Iterator[Ref]:
        yield self.weights(layer)
        if self._reads_table(layer):
            yield Ref("w0", "w0")

    def _passing(self, layer: int) -> Ref:
        """Where compute leaves and finds what a layer keeps of a micro-batch."""
        layout = self.layout
        if layout.table[layer].activations is Tier.GPU:
            return _kept(layer)
        start = layout.positions[layer] * layout.graph.strategy.accumulation_group
        return Ref(f"act.{layout.graph.layers[layer]}", f"a{layer}", start, moving=True)

    def _staged(self, layer: int) -> Ref:
        passing = self._passing(layer)
        name = self.layout.graph.layers[layer]
        return Ref(f"stage.a.{name}", passing.content, passing.entry, moving=True)

    def _save(self, layer: int) -> Iterator[Action]:
        """Move what the layer keeps of a micro-batch off the GPU."""
        at, nbytes = self.layout.table[layer].activations, self.layout.kept(layer)
        if at is Tier.GPU:
            return
        source = self._passing(layer)
        target = _kept(layer) if at is Tier.HOST else self._staged(layer)
        move = ((source,), (target,), (source,), nbytes, 0)
        yield Action(Op.SAVE, Lane.D2H, layer, *move)
        if at is Tier.NVME:
            move = ((target,), (_kept(layer),), (target,), nbytes, 0)
            yield Action(Op.WRITE, Lane.NVME_WRITE, layer, *move)

    def _fetch(self, layer: int) -> Iterator[Action]:
        """Bring it back before the micro-batch's backward."""
        at, nbytes = self.layout.table[layer].activations, self.layout.kept(layer)
        if at is Tier.GPU:
            return
        source = _kept(layer)
        if at is Tier.NVME:
            staged = self._staged(layer)
            move = ((source,), (staged,), (source,), nbytes, 0)
            yield Action(Op.READ, Lane.NVME_READ, layer, *move)
            source = staged
        yield Action(
            Op.FETCH, Lane.H2D, layer, (source,), (self._passing(layer),), (source,), nbytes, 0
        )

    def _receive(self, layer: int, *, forward: bool) -> Iterator[Action]:
        layout = self.layout
        at_edge = layer == (min(layout.table) if forward else max(layout.table))
        outer = layout.is_first if forward else layout.is_last
        if at_edge and not outer:
            ref = _hidden("h", layer - 1) if forward else _hidden("d", layer, gradient=True)
            nbytes = layout.hidden_bytes
            yield Action(
                Op.RECV, Lane.RECV, layer, writes=(ref,), amount=nbytes, micro_batch=0
            )

    def _send(self, layer: int, *, forward: bool) -> Iterator[Action]:
        layout = self.layout
        at_edge = layer == (max(layout.table) if forward else min(layout.table))
        outer = layout.is_last if forward else layout.is_first
        if at_edge and not outer:
            ref = _hidden("h", layer) if forward else _hidden("d", layer - 1, gradient=True)
            nbytes = layout.hidden_bytes
            yield Action(Op.SEND, Lane.SEND, layer, reads=(ref,), amount=nbytes, micro_batch=0)


def _kept(layer: int) -> Ref:
    return Ref(f"a{layer}", f"a{layer}", moving=True)


def _hidden(ring: str, layer: int, *, gradient: bool = False) -> Ref:
    """The output of `layer`, or the loss's gradient by it."""
    return Ref(ring, f"{'d' if gradient else 'h'}{layer}", moving=True)


def _at(action: Action, micro_batch: int) -> Action:
    return replace(action, micro_batch=micro_batch)
