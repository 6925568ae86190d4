"""FORWARD and BACKWARD of one layer on one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from bigplan.content import Holds
from bigplan.graph.graph import Recompute
from bigplan.placement import Tier
from bigplan.program import ROWS, Action
from bigplan.runtime import blocks
from bigplan.runtime.blocks import Ways
from bigplan.runtime.context import Context, find
from bigplan.runtime.data import Prefetcher
from bigplan.runtime.kept import Kept, differentiate
from bigplan.runtime.lookup import Entry, send_home
from bigplan.runtime.products import Sums, accumulates_in_product, gated, unread

TABLE = "embed_tokens.weight"  # what the loss layer may share with the first
SUMS = (Holds.GRADIENTS, Holds.PARTIAL_GRADIENTS)  # what a backward adds its gradients to


class Compute:
    """The layers of one rank. Hidden states between layers and what layers keep live here."""

    def __init__(self, context: Context, batches: Prefetcher) -> None:
        self._context = context
        self.batches = batches
        self.hidden = context.memory.dynamic
        self.kept: dict[tuple[int, int], Kept] = {}
        self.losses: list[Tensor] = []
        self._arrived: dict[int, Tensor] = {}  # targets by micro-batch, ahead of the loss
        self._has_loss = len(context.graph.layers) - 1 in context.program.layers
        self.step = 0
        self.loss_scale = 1.0  # gradients, not reported losses, are multiplied by it
        training = context.training
        self._rope = blocks.rope_table(
            context.model, training.sequence_length, context.device, context.parameter_dtype
        )
        self._constants = frozenset(t.untyped_storage().data_ptr() for t in self._rope)
        self._in_product = accumulates_in_product(context.gradient_dtype)
        self._share = 0.0  # of one target in the mean over the step's, of all ranks

    @contextmanager
    def evaluating(self, batches: Prefetcher) -> Iterator[None]:
        """Take these batches instead of the training's, from their first step on."""
        training = self.batches, self.step
        self.batches, self.step = batches, 0
        try:
            yield
        finally:
            self.batches, self.step = training

    def data(self, action: Action) -> None:
        """A micro-batch, which was read ahead, into the memory that the device copies it from."""
        batch = self.batches.take(self.step, action.micro_batch)
        into = self._context.batch(action.writes, action)
        into[0].copy_(batch.tokens)
        into[1].copy_(batch.targets)
        self._share = 1.0 / max(1, batch.counted)

    def forward(self, action: Action) -> None:
        """Run a layer forward; leave its output and what it keeps, where the action keeps it."""
        context, layer = self._context, action.layer
        for ref in action.writes:
            context.memory.storages.pop(context.key(ref, action), None)
        if all(ref.content.kind is not Holds.ACTIVATIONS for ref in action.writes):
            self._forward_alone(action)
            return
        kept = Kept(weights=context.bytes_of(action.reads[0], action))
        self.kept[layer, action.micro_batch] = kept
        if layer == 0:
            tokens = self._tokens(action)
            kept.saved = [tokens]
            output = self._embedded(tokens, action)
        else:
            x = self._hidden(Holds.HIDDEN, action)
            if layer == len(context.graph.layers) - 1:
                kept.saved = [x]  # the loss layer does all its work in its backward
                return
            output = self._forward_block(kept, x, action)
            if self._stays(layer):
                kept.stay()
        self._leave(Holds.HIDDEN, action, output)

    def _stays(self, layer: int) -> bool:
        """Whether what leaves the GPU elsewhere stays in the ring: then it has no home."""
        away = self._context.program.layers[layer].activations is not Tier.GPU
        return away and f"a{layer}" not in self._context.program.buffers

    @torch.no_grad()
    def _embedded(self, tokens: Tensor, action: Action) -> Tensor:
        """Of the layer's tables, or of rows that were looked up in them."""
        context, source = self._context, action.reads[0]
        if source.buffer == ROWS:
            return Entry.of(context, source, action).embedded()
        return blocks.embedding(self._parameters(action), tokens, context.model)

    def _tokens(self, action: Action) -> Tensor:
        """On the device, whose copy outlasts the host's; the targets come with them.

        At the loss, activations are on their way back, and one copy goes at a time: its targets
        came 40 ms late behind them (5.5B on 24 GiB, an H200).
        """
        wanted = self._context.batch(action.reads, action)[: 1 + self._has_loss]
        copied = wanted.to(self._context.device, non_blocking=True, copy=True)
        if self._has_loss:
            self._arrived[action.micro_batch] = copied[1]
        return copied[0]

    @torch.no_grad()
    def _forward_alone(self, action: Action) -> None:
        """A layer of an evaluation; of the loss layer the loss."""
        context, layer = self._context, action.layer
        if layer == 0:
            output = self._embedded(self._tokens(action), action)
        else:
            x = self._hidden(Holds.HIDDEN, action)
            if layer == len(context.graph.layers) - 1:
                targets, parameters = self._targets(action), self._head(action)
                for start, stop in _chunks(targets.numel(), context.graph.loss_chunk):
                    self._losses_of(parameters, x.flatten(0, 1)[start:stop], targets[start:stop])
                return
            output = self._block(self._parameters(action))(x)
        self._leave(Holds.HIDDEN, action, output)

    def backward(self, action: Action) -> None:
        """Run a layer backward; add to its gradients, leave the gradient by its input."""
        layer, last = action.layer, len(self._context.graph.layers) - 1
        kept = self.kept.pop((layer, action.micro_batch))
        if kept.fetched and not kept.foreign:
            entry = find(action.frees, Holds.ACTIVATIONS)
            self._context.memory.storages[self._context.key(entry, action)] = kept.fetched
        if layer == last:
            by_input = self._loss(kept, action)
        else:
            gradient = self._hidden(Holds.HIDDEN_GRADIENT, action)
            if layer == 0:
                self._embedding_gradient(kept, gradient, action)
                return
            by_input = self._backward_block(kept, gradient, action)
        self._leave(Holds.HIDDEN_GRADIENT, action, by_input)

    def _forward_block(self, kept: Kept, x: Tensor, action: Action) -> Tensor:
        recompute = self._context.program.layers[action.layer].recompute
        if recompute is Recompute.FULL:
            kept.keep_input(x)
            with torch.no_grad():
                return self._block(self._parameters(action))(x)
        ways = Ways(self._linears(kept.sums))
        if recompute is not Recompute.NONE:
            product = kept.sums.gated if self._in_product else gated
            ways = ways._replace(forget=kept.forget, gated=product)
        if recompute is Recompute.MLP:
            ways = ways._replace(widening=kept.products_again(ways.linears))
        return self._record_block(kept, x, action, ways)

    def _record_block(self, kept: Kept, x: Tensor, action: Action, ways: Ways) -> Tensor:
        parameters = self._leaves(self._parameters(action))
        kept.parameters = _differentiated(parameters)
        kept.constants = self._constants
        return kept.record(self._block(parameters, ways), x)

    def _backward_block(self, kept: Kept, gradient: Tensor, action: Action) -> Tensor:
        kept.weights = self._context.bytes_of(action.reads[0], action)
        if action.recompute is Recompute.FULL:
            again = Kept(weights=kept.weights)
            closing = again.sums.unread if self._in_product else unread
            product = partial(again.sums.gated if self._in_product else gated, unread=True)
            ways = Ways(self._linears(again.sums), closing=closing, gated=product)
            self._record_block(again, kept.fetched_input(), action, ways)
            kept = again
        self._open(kept.sums, action)
        by_input, gradients = kept.gradients(gradient)
        kept.sums.add(gradients)
        return by_input

    def _block(
        self, parameters: dict[str, Tensor], ways: Ways = blocks.PLAIN
    ) -> Callable[[Tensor], Tensor]:
        model, rope = self._context.model, self._rope
        return lambda x: blocks.block(parameters, x, model, rope, ways)

    def _embedding_gradient(self, kept: Kept, gradient: Tensor, action: Action) -> None:
        if action.writes[0].buffer == ROWS:
            send_home(self._context, action, gradient, kept.kept_input())
            return
        self._open(kept.sums, action)
        for name, rows in blocks.looked_up(kept.kept_input(), self._context.model).items():
            kept.sums.add_rows(name, rows, gradient.flatten(0, 1))

    def _loss(self, kept: Kept, action: Action) -> Tensor:
        """Loss and its gradients, a chunk of tokens at a time: never all logits at once."""
        context, x = self._context, kept.kept_input()
        targets, parameters = self._targets(action), self._leaves(self._head(action))
        self._open(kept.sums, action)
        by_input = torch.empty_like(x)
        for start, stop in _chunks(targets.numel(), context.graph.loss_chunk):
            piece = x.flatten(0, 1)[start:stop]
            by_input.flatten(0, 1)[start:stop] = self._loss_piece(
                parameters, piece, targets[start:stop], kept.sums
            )
        kept.sums.close()  # positions get no gradient here
        return by_input

    def _loss_piece(
        self, parameters: dict[str, Tensor], x: Tensor, targets: Tensor, sums: Sums
    ) -> Tensor:
        """The gradient by one chunk; those by the parameters are added up and gone at its end."""
        x, leaves = _leaf(x), _differentiated(parameters)
        with torch.enable_grad():
            loss = self._losses_of(parameters, x, targets, self._linears(sums))
        scale = torch.full_like(loss, self._share * self.loss_scale)
        by_x, *gradients = differentiate([loss], [x, *leaves.values()], [scale])
        sums.add(dict(zip(leaves, gradients, strict=True)))
        return by_x

    def _targets(self, action: Action) -> Tensor:
        """int64 [micro_batch * sequence_length], on the device."""
        targets = self._arrived.pop(action.micro_batch, None)
        if targets is None:  # another rank has the first layer
            targets = self._context.batch(action.reads, action)[1]
            targets = targets.to(self._context.device, non_blocking=True)
        return targets.flatten()

    def _head(self, action: Action) -> dict[str, Tensor]:
        """The loss layer's parameters, with the first layer's table where they share it."""
        context, parameters = self._context, self._parameters(action)
        if context.graph.tied:
            flat = context.flat(action.reads[1], action, context.parameter_dtype)
            parameters[TABLE] = context.views(flat, 0)[TABLE]
        return parameters

    def _losses_of(
        self,
        parameters: dict[str, Tensor],
        x: Tensor,
        targets: Tensor,
        linears: blocks.Linears = blocks.plain_linears,
    ) -> Tensor:
        """Sum of the losses of x [tokens, h]; their part of the mean goes to `losses`."""
        loss = blocks.head_loss(parameters, x[None], targets[None], self._context.model, linears)
        self.losses.append(loss.detach() * self._share)
        return loss

    def _parameters(self, action: Action) -> dict[str, Tensor]:
        context = self._context
        flat = context.flat(action.reads[0], action, context.parameter_dtype)
        return context.views(flat, action.layer)

    def _leaves(self, views: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters for autograd to differentiate by, but for matrices that products add up."""
        return {
            name: view if self._in_product and view.dim() == 2 else _leaf(view)
            for name, view in views.items()
        }

    def _linears(self, sums: Sums) -> blocks.Linears:
        return sums.linears if self._in_product else blocks.plain_linears

    def _open(self, sums: Sums, action: Action) -> None:
        """The sums of an action's layer, and of the first layer where the loss shares its table."""
        context = self._context
        for total in action.writes:
            if total.content.kind in SUMS:
                flat = context.flat(total, action, context.gradient_dtype)
                views = context.views(flat, total.content.layer)
                sums.open(views, fresh=total not in action.reads)

    def _hidden(self, kind: Holds, action: Action) -> Tensor:
        tensor = self.hidden[self._context.key(find(action.reads, kind), action)]
        assert isinstance(tensor, Tensor)
        return tensor

    def _leave(self, kind: Holds, action: Action, output: Tensor) -> None:
        self.hidden[self._context.key(find(action.writes, kind), action)] = output


def _chunks(tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    for start in range(0, tokens, chunk):
        yield start, min(start + chunk, tokens)


def _leaf(tensor: Tensor) -> Tensor:
    """The same memory, for autograd to differentiate by."""
    return tensor.detach().requires_grad_()


def _differentiated(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that autograd gives gradients of."""
    return {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
