"""FORWARD and BACKWARD of one layer on one micro-batch, and DATA that they start from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from bigplan.content import Content, Holds
from bigplan.placement import Tier
from bigplan.program import Action
from bigplan.runtime.context import Context, find
from bigplan.runtime.data import Prefetcher
from bigplan.runtime.layers.carried import UnderWay
from bigplan.runtime.layers.kept import KeptActivations
from bigplan.runtime.layers.kinds import layers_of
from bigplan.runtime.layers.losses import Losses
from bigplan.runtime.layers.preference import PairLoss
from bigplan.runtime.layers.visit import Visit
from bigplan.spec.layers import first_block


class Compute:
    """Lets the layers of one rank visit their memory. What they keep lives here."""

    def __init__(self, context: Context, batches: Prefetcher) -> None:
        self._context = context
        self.batches = batches
        self.step = 0
        self.losses = Losses()
        self.kept: dict[tuple[int, int], KeptActivations] = {}  # by layer and micro-batch
        wanted = context.training.preference
        self.pairs = None if wanted is None else PairLoss(context, wanted, self.losses)
        self._under_way = UnderWay(context.model, trained=not context.graph.frozen)
        self._layers = layers_of(context, self.losses, self._under_way, self.pairs)
        self._staying = _staying(context)
        stage, every = context.program.layers, context.graph.layers
        self._first, self._last = min(stage), max(stage)
        handing = context.model.carries
        # Layers that take a message of the stage before, and that make one for the stage after.
        self._starts = {self._first} - {0} if handing else set[int]()
        self._ends = {self._last} - {len(every) - 1} if handing else set[int]()

    @contextmanager
    def evaluating(self, batches: Prefetcher) -> Iterator[None]:
        """Take these batches instead of the training's, from their first step on."""
        training = self.batches, self.step
        self.batches, self.step = batches, 0
        try:
            yield
        finally:
            self.batches, self.step = training

    def begin(self, step: int) -> None:
        """The step, of training or evaluation, that is played next; nothing runs on the device."""
        self.step = step
        if (documents := self._context.documents) is not None:
            documents.fill(self.batches.bounds(step))
        if (draws := self._context.draws) is not None:
            draws.fill(self.batches.firsts(step))
        if self.pairs is not None:
            self.pairs.fill(self.batches.pairs(step))

    def data(self, action: Action) -> None:
        """A micro-batch, which was read ahead, into the memory that the device copies it from."""
        batch = self.batches.take(self.step, action.micro_batch)
        into = self._context.batch(action.writes, action)
        into[0].copy_(batch.tokens)
        into[1].copy_(batch.targets)
        self.losses.counted, self.losses.share = batch.counted, 1.0 / batch.divisor

    def forward(self, action: Action) -> None:
        """Run a layer forward; leave its output and what it keeps, where the action keeps it."""
        context, number = self._context, action.layer
        for ref in action.writes:
            context.memory.storages.pop(context.entries.key(ref, action), None)
        layer, visit = self._layers[number], Visit(context, action)
        if number in self._starts:
            self._take(action, Holds.HIDDEN, self._under_way.receive)
        if visit.keeps:
            kept = KeptActivations(weights=visit.weights())
            self.kept[number, action.micro_batch] = kept
            output = layer.forward(visit, kept)
            if number in self._staying:
                kept.stay()
        else:
            output = layer.evaluate(visit)
        if number in self._ends:
            assert output is not None
            output = self._under_way.message(output, action.micro_batch)
        if output is not None:
            visit.leave(Holds.HIDDEN, output)
        if number == self._last and not visit.keeps:
            self._under_way.carried.pop(action.micro_batch, None)

    def backward(self, action: Action) -> None:
        """Run a layer backward; add to its gradients, leave the gradient by its input."""
        context, number = self._context, action.layer
        kept = self.kept.pop((number, action.micro_batch))
        if kept.fetched and not kept.foreign:
            entry = find(action.frees, Holds.ACTIVATIONS)
            context.memory.storages[context.entries.key(entry, action)] = kept.fetched
        if not context.kind(number).idle_backward:
            visit = Visit(context, action)
            if number in self._ends:
                self._take(action, Holds.HIDDEN_GRADIENT, self._under_way.receive_back)
            by_input = self._layers[number].backward(visit, kept)
            if number in self._starts:
                assert by_input is not None
                by_input = self._under_way.message_back(by_input, action.micro_batch)
            if by_input is not None:
                visit.leave(Holds.HIDDEN_GRADIENT, by_input)
        if number == self._first:
            self._under_way.carried.pop(action.micro_batch, None)

    def _take(
        self, action: Action, kind: Holds, receive: Callable[[Tensor, int, int], Tensor]
    ) -> None:
        """Have the layer read hidden states, or gradients, where a message came with more."""
        context = self._context
        dynamic, number = context.memory.dynamic, action.layer - first_block(context.graph.layers)
        key = context.entries.key(find(action.reads, kind), action)
        message = dynamic[key]
        assert isinstance(message, Tensor)
        dynamic[key] = receive(message, action.micro_batch, number)


def _staying(context: Context) -> frozenset[int]:
    """Layers whose activations need no home: they stay in the ring by which others leave."""
    program = context.program
    away = (n for n, placement in program.layers.items() if placement.activations is not Tier.GPU)
    homes = {number: program.home(Content(Holds.ACTIVATIONS, number)) for number in away}
    return frozenset(number for number, home in homes.items() if home is None)
