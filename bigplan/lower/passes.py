"""Forward and backward of one accumulation group on one stage, as actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from bigplan.lower import micro_batch
from bigplan.lower.adapters import save_adapters, sum_adapters, update_adapters
from bigplan.lower.checkpoint import checkpoint_layer
from bigplan.lower.gradients import bring_home, sum_repeated
from bigplan.lower.layout import StageLayout
from bigplan.lower.refs import Refs, parameter_home
from bigplan.lower.sizes import cpu_piece, gathered_bytes, parameter_bytes
from bigplan.lower.table import borrow, hand_back, lend, take_back
from bigplan.lower.unit import AccumulationGroup
from bigplan.lower.update import begin_update, end_update, gathered, update_layer
from bigplan.placement import Tier
from bigplan.program import Action, Instruction, Lane, Op, Ref, Repeat, numbered


@dataclass(slots=True)
class Emitter:
    """Emits a stage's passes in program order, tracking which layer each GPU slot holds."""

    layout: StageLayout
    deferred: bool  # this step starts with the previous step's updates
    saves: bool = False  # each layer is written to a checkpoint once it is updated
    evaluates: bool = False  # forward alone, which keeps nothing
    held: dict[tuple[str, int], int] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)  # layers whose update has yet to begin
    begun: list[int] = field(default_factory=list)  # layers whose update has yet to end
    reduced: list[Action] = field(default_factory=list)  # what waits for the last reduction
    # Actions that follow reductions of whole gradients.
    whole: list[Action] = field(default_factory=list)
    adapted: bool = False  # a backward has begun the sum of adapters' gradients
    _fetches: dict[str, list[int]] = field(default_factory=dict)  # of this backward pass
    # What was made before, of micro-batch 0: the passes of a step differ in their numbers alone.
    _made: dict[tuple[object, ...], list[Action]] = field(default_factory=dict)
    refs: Refs = field(init=False)
    last_on_cpu: int = field(init=False)  # layer that the CPU updates at least in part
    following: dict[int, int] = field(init=False)  # by layer, the stage's next one

    def __post_init__(self) -> None:
        self.refs = Refs(self.layout)
        self.following = dict(pairwise(self.layout.table))
        trained = [] if self.layout.graph.frozen else list(self.layout.table)
        self.pending = trained if self.deferred else []
        on_cpu = (layer for layer in self.layout.table if cpu_piece(self.layout, layer))
        self.last_on_cpu = max(on_cpu, default=-1)

    @property
    def _group(self) -> int:
        return self.layout.graph.strategy.accumulation_group

    def forward(self, unit: AccumulationGroup) -> Iterator[Instruction]:
        """A chunk's layers on all micro-batches of the unit; the last layer's backward included."""
        position = self.layout.position
        if unit.opens:
            yield from borrow(self.layout)
            if self.deferred:
                yield from self._update_adapters()
        layers = list(position.chunks[unit.turn])
        visiting = [layer for layer in layers if layer in self.layout.visiting]
        ahead = self.layout.rings.slots
        # The last layer gets its slot after the first layer left it.
        if self.layout.rings.most.shared_ends:
            ahead = min(ahead, max(1, len(visiting) - 1))
        if position.stage > 0 and not visiting:
            # While the stage waits for its first micro-batch it can update all its layers. Behind a
            # layer's forward, gradients of later layers would wait too.
            yield from self._update_until(max(self.layout.table))
        for layer in visiting[:ahead]:
            yield from self._bring(layer)
        for layer in layers:
            # Gradients of the next layer leave before the activations of this layer.
            yield from self._update_until(layer, ahead=True)
            if layer == 0 and unit.opens:
                yield from lend(self.layout)
            if layer == position.loss and not self.evaluates:
                yield from self._backward_layer(layer, unit)
            else:
                yield from self._forward_layer(layer, unit)
            if layer in visiting:
                for coming in visiting[visiting.index(layer) + ahead :][:1]:
                    yield from self._bring(coming)

    def backward(self, unit: AccumulationGroup) -> Iterator[Instruction]:
        """A chunk's layers in reverse on all micro-batches of the unit."""
        # The last layer's backward followed its forward.
        position = self.layout.position
        layers = [layer for layer in position.chunks[unit.turn][::-1] if layer != position.loss]
        visiting = [
            layer
            for layer in layers
            if layer in self.layout.visiting and not self.layout.kind(layer).idle_backward
        ]
        ahead = self.layout.rings.slots
        self._fetches = self._fetch_order(layers)
        for name, order in self._fetches.items():
            free = ahead - (self._group if name in self.layout.staying else 0)
            for item in range(min(free, len(order) * self._group)):
                yield from self._fetch(order, item, unit)
        for layer in visiting[:ahead]:
            yield from self._bring(layer)
        if unit.last and unit.turn < len(position.chunks) - 1:
            # Gradients of the chunk after this one were reduced while this one ran backward.
            yield from self._use_whole()
        for layer in layers:
            yield from self._backward_layer(layer, unit)
            if layer in visiting:
                for coming in visiting[visiting.index(layer) + ahead :][:1]:
                    yield from self._bring(coming)
        yield from self._after_reduction([])

    def finish(self) -> Iterator[Action]:
        """End the step: gradients that stay are used, and every slot is emptied.

        Gradients that stay need no ring entry. So their reduction may wait until earlier stages
        have their messages. The next update makes the copies in slots stale.
        """
        yield from self._use_whole()
        for layer in list(self.held.values()):
            yield from self._release(layer)
        if not self.evaluates:
            yield from hand_back(self.layout)
            yield from sum_adapters(self.layout)
            if not self.layout.graph.deferred:
                yield from self._update_adapters()

    def _update_adapters(self) -> Iterator[Action]:
        yield from update_adapters(self.layout)
        if self.saves:
            yield from save_adapters(self.layout)

    def _use_whole(self) -> Iterator[Action]:
        yield from self.whole
        self.whole = []

    def _release(self, layer: int) -> Iterator[Action]:
        weights = self.refs.weights(layer)
        key = weights.buffer, weights.entry
        if self.held.get(key) == layer:
            del self.held[key]
            yield Action(Op.FREE, Lane.COMPUTE, layer, frees=(weights,))

    def _update_until(self, layer: int, *, ahead: bool = False) -> Iterator[Instruction]:
        """Update layers up to `layer`; `ahead`: of the next one what the GPU does not hold, too.

        A layer that ranks gather is updated in whole, so that it is gathered while this one runs.
        """
        last = self.following.get(layer, layer) if ahead else layer
        while self.pending and self.pending[0] <= last:
            self.begun.append(self.pending.pop(0))
            yield from begin_update(self.layout, self.begun[-1])
            if gathered(self.layout, self.begun[-1]):
                yield from self._end_update(self.begun.pop())
        while self.begun and self.begun[0] <= layer:
            yield from self._end_update(self.begun.pop(0))

    def _end_update(self, layer: int) -> Iterator[Action]:
        yield from end_update(self.layout, layer)
        yield from self._save(layer)

    def _save(self, layer: int) -> Iterator[Action]:
        if self.saves:
            yield from checkpoint_layer(self.layout, layer)

    def _bring(self, layer: int) -> Iterator[Instruction]:
        """Fill the layer's slot, unless it still holds the layer."""
        layout, slot = self.layout, self.refs.weights(layer)
        if self.pending or self.begun:
            yield from self._update_until(layer)
        occupant = self.held.get((slot.buffer, slot.entry))
        if occupant == layer:
            return
        if occupant is not None:
            yield from self._release(occupant)
        self.held[slot.buffer, slot.entry] = layer
        name, source = layout.graph.layers[layer], parameter_home(layer)
        at = layout.table[layer].parameters
        nbytes, sharded = parameter_bytes(layout, layer), layout.shards(layer, from_zero=3)
        if at is Tier.NVME:
            staged = Ref(f"stage.w.{name}", source.content, layout.turns["stage.w"][layer])
            yield Action(Op.READ, Lane.NVME_READ, layer, (source,), (staged,), amount=nbytes)
            source = staged
        if at is not Tier.GPU:
            target = slot
            if sharded:
                target = Ref(f"shard.{name}", source.content, slot.entry)
            yield Action(Op.LOAD, Lane.H2D, layer, (source,), (target,), amount=nbytes)
            source = target
        if sharded:
            nbytes = gathered_bytes(layout, layer)
            yield Action(Op.GATHER, Lane.COMM, layer, (source,), (slot,), amount=nbytes)

    def _once(self, make: Callable[[], Iterable[Action]], *key: object) -> list[Action]:
        """The actions that `make` gives, made once for the key."""
        if key not in self._made:
            self._made[key] = list(make())
        return self._made[key]

    def _forward_layer(self, layer: int, unit: AccumulationGroup) -> Iterator[Instruction]:
        beside = bool(self.pending) and self.pending[0] <= self.last_on_cpu
        body = self._once(lambda: self._forward(layer, beside), "forward", layer, beside)
        yield from _repeated(self._group, [numbered(action, unit.base) for action in body])

    def _forward(self, layer: int, beside_update: bool) -> Iterator[Action]:
        refs, keeps = self.refs, not self.evaluates
        yield from micro_batch.data(refs, layer)
        yield from micro_batch.look_up(refs, layer)
        yield from micro_batch.receive(refs, layer, forward=True)
        yield micro_batch.forward(refs, layer, keeps=keeps)
        if keeps:
            yield from micro_batch.save(refs, layer, beside_update=beside_update)
        yield from micro_batch.send(refs, layer, forward=True)

    def _fetch_order(self, layers: list[int]) -> dict[str, list[int]]:
        """By ring, the layers whose activations a backward pass fetches, in its order."""
        order: dict[str, list[int]] = {}
        for layer in layers:
            moved = self.layout.table[layer].activations is not Tier.GPU
            if moved and not self.layout.stays(layer):
                order.setdefault(self.layout.keeps(layer), []).append(layer)
        return order

    def _fetch(self, order: list[int], item: int, unit: AccumulationGroup) -> Iterator[Action]:
        """The item-th fetch of a ring in the pass: layer by layer, micro-batches within a layer."""
        place, number = divmod(item, self._group)
        if place < len(order):
            layer = order[place]
            fetched = self._once(lambda: micro_batch.fetch(self.refs, layer), "fetch", layer)
            for action in fetched:
                yield numbered(action, unit.base + number)

    def _fetch_ahead(self, layer: int, number: int, unit: AccumulationGroup) -> list[Action]:
        """The fetch into the ring entry that the layer's micro-batch has just left.

        Fetches run a whole ring ahead. A fetch that was issued just before its backward would wait
        behind the load of a layer whose slot is still in use.
        """
        turn, order = self._fetch_turn(layer), self._fetches.get(self.layout.keeps(layer), [])
        if turn is None:
            return []
        return list(self._fetch(order, turn * self._group + number + self.layout.rings.slots, unit))

    def _fetch_turn(self, layer: int) -> int | None:
        """The layer's place among those fetched through its ring; -1: it stays, None: no place."""
        order = self._fetches.get(self.layout.keeps(layer), [])
        if self.layout.stays(layer):
            return -1
        return order.index(layer) if layer in order else None

    def _backward_layer(self, layer: int, unit: AccumulationGroup) -> Iterator[Instruction]:
        """The layer's backward, of the last layer with its forward, and what gradients do then."""
        yield from self._backward_each(layer, unit)
        if self.layout.kind(layer).frozen:
            return
        total = self.refs.gradient_sum(layer)
        yield from sum_repeated(self.layout, layer, total, unit)
        if layer == 0 and unit.last:
            yield from take_back(self.layout)
        rest = list(bring_home(self.layout, layer, total, unit))
        if unit.last and not self.layout.graph.deferred:
            yield from self._release(layer)  # the update makes the copy in the slot stale
            rest += [*update_layer(self.layout, layer), *self._save(layer)]
        if rest and rest[0].op is Op.REDUCE and not self.layout.sums_apart(layer):
            reduction = _reduction(rest)
            yield from reduction
            yield from self._after_last_reduction(rest[len(reduction) :])
        else:
            yield from self._after_reduction(rest)

    def _after_last_reduction(self, rest: list[Action]) -> Iterator[Action]:
        """What follows the reduction of gradients that stay needs no entry of a ring.

        In a pipeline it comes after messages that earlier stages wait for. Otherwise updates come
        one layer later, so that ranks gather parameters while earlier layers run backward.
        """
        if self.layout.graph.strategy.pp > 1 or self.layout.graph.deferred:
            self.whole += rest
            return
        yield from self.reduced
        self.reduced = rest

    def _after_reduction(self, rest: list[Action]) -> Iterator[Action]:
        """What follows a reduction comes one layer later, so that the GPU computes meanwhile.

        It comes no later, because the layer after the next needs this entry of the sum ring. Where
        the ring has a single entry, or kinds share it, the next layer may need the entry.
        """
        alone = self.layout.rings.most.sums == 1 or self.layout.rings.most.shared_ends
        reduction = [] if alone else _reduction(rest)
        yield from reduction
        yield from self.reduced
        self.reduced = rest[len(reduction) :] if reduction else []
        yield from () if reduction else rest

    def _backward(self, layer: int, adds_to: list[Ref], *, adds: bool) -> Iterator[Action]:
        """A micro-batch's backward with its messages; the last layer's forward comes before it."""
        refs, is_loss = self.refs, layer == self.layout.position.loss
        if is_loss:
            yield from micro_batch.data(refs, layer)
        yield from micro_batch.receive(refs, layer, forward=is_loss)
        if is_loss:
            yield micro_batch.forward(refs, layer)
        yield micro_batch.backward(refs, layer, adds_to)
        yield from micro_batch.send(refs, layer, forward=False)
        yield from micro_batch.rows_home(refs, layer, adds=adds)

    def _backward_each(self, layer: int, unit: AccumulationGroup) -> Iterator[Instruction]:
        """Backward of every micro-batch; the first one writes the gradient sum if it is new."""
        graph = self.layout.graph
        # Where one stage has both ends of a tied model, the last layer has begun the table's sum.
        shared = graph.tied and not graph.lends_table and layer == 0
        fresh = (unit.first or self.layout.sums_apart(layer)) and not shared
        # The shared table's sum is in its home, begun once a step.
        sums = list(self.refs.sums(layer))
        table = sums[1:]
        if graph.frozen:
            fresh = bool(sums) and not self.adapted
            self.adapted |= fresh
        if fresh:
            started = [] if unit.first else table
            start = self._once(
                lambda: self._backward(layer, started, adds=False), "start", layer, unit.first
            )
            yield from (numbered(action, unit.base) for action in start)
            yield from self._fetch_ahead(layer, 0, unit)
            if self._group == 1:
                return
        rest = self._once(lambda: self._backward(layer, sums, adds=True), "rest", layer)
        # While fetches are for the layer's own micro-batches, all micro-batches are alike.
        alone = self._fetch_turn(layer) is None
        first = int(fresh)
        split = self._group if alone else max(first, self._group - self.layout.rings.slots)
        ahead = self._fetch_ahead(layer, first, unit)
        moved = [*(numbered(action, unit.base + first) for action in rest), *ahead]
        yield from _repeated(split - first, moved)
        for number in range(split, self._group):
            yield from (numbered(action, unit.base + number) for action in rest)
            yield from self._fetch_ahead(layer, number, unit)


def _reduction(actions: list[Action]) -> list[Action]:
    """The collectives that the actions begin with: they wait for nothing but a backward."""
    return list(takewhile(lambda action: action.op in (Op.REDUCE, Op.SUM_REPLICAS), actions))


def _repeated(count: int, body: list[Action]) -> Iterator[Instruction]:
    """`body` for as many micro-batches as it is given for, in a row."""
    if count > 0:
        yield from body if count == 1 else [Repeat(count, 1, tuple(body))]
