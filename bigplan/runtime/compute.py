"""FORWARD and BACKWARD of one layer on one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bigplan.graph.graph import Recompute
from bigplan.program import Action, Ref
from bigplan.runtime import blocks
from bigplan.runtime.context import Context, find
from bigplan.runtime.data import Prefetcher
from bigplan.runtime.kept import Kept


class Compute:
    """The layers of one rank. Hidden states between layers and what layers keep live here."""

    def __init__(self, context: Context, batches: Prefetcher) -> None:
        self._context = context
        self.batches = batches
        self.hidden = context.memory.dynamic
        self.kept: dict[tuple[int, int], Kept] = {}
        self.losses: list[Tensor] = []
        self.step = 0
        self.loss_scale = 1.0  # gradients, not reported losses, are multiplied by it
        training = context.training
        self._rope = blocks.rope_table(
            context.model, training.sequence_length, context.device, context.parameter_dtype
        )
        self._constants = frozenset(t.untyped_storage().data_ptr() for t in self._rope)
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
        into = self._batch(action.writes, action)
        into[0].copy_(batch.tokens)
        into[1].copy_(batch.targets)
        self._share = 1.0 / max(1, batch.counted)

    def _batch(self, refs: Sequence[Ref], action: Action) -> Tensor:
        """Tokens and targets, int64 [2, micro_batch, sequence_length], in host memory."""
        flat = self._context.bytes_of(find(refs, "data"), action).view(torch.int64)
        length = self._context.training.sequence_length
        rows = self._context.graph.strategy.micro_batch
        return flat[: 2 * rows * length].view(2, rows, length)

    def forward(self, action: Action) -> None:
        """Run a layer forward; leave its output and what it keeps, where the action keeps it."""
        context, layer = self._context, action.layer
        for ref in action.writes:
            context.memory.storages.pop(context.key(ref, action), None)
        if all(ref.content != f"a{layer}" for ref in action.writes):
            self._forward_alone(action)
            return
        kept = Kept(weights=context.bytes_of(action.reads[0], action))
        self.kept[layer, action.micro_batch] = kept
        if layer == 0:
            tokens = self._tokens(action)
            kept.saved = [tokens]
            with torch.no_grad():
                output = blocks.embedding(self._parameters(action), tokens, context.model)
        else:
            x = self._hidden(action.reads, f"h{layer - 1}", action)
            if layer == len(context.graph.layers) - 1:
                kept.saved = [x]  # the loss layer does all its work in its backward
                return
            output = self._forward_block(kept, x, action)
        self._leave(action.writes, f"h{layer}", action, output)

    def _tokens(self, action: Action) -> Tensor:
        """On the device, whose copy outlasts the host's."""
        tokens = self._batch(action.reads, action)[0]
        return tokens.to(self._context.device, non_blocking=True, copy=True)

    @torch.no_grad()
    def _forward_alone(self, action: Action) -> None:
        """A layer of an evaluation; of the loss layer the loss."""
        context, layer = self._context, action.layer
        if layer == 0:
            parameters = self._parameters(action)
            output = blocks.embedding(parameters, self._tokens(action), context.model)
        else:
            x = self._hidden(action.reads, f"h{layer - 1}", action)
            if layer == len(context.graph.layers) - 1:
                targets, parameters = self._targets(action), self._head(action, gradients=False)
                for start, stop in _chunks(targets.numel(), context.graph.loss_chunk):
                    self._losses_of(parameters, x.flatten(0, 1)[start:stop], targets[start:stop])
                return
            output = self._block(self._parameters(action))(x)
        self._leave(action.writes, f"h{layer}", action, output)

    def backward(self, action: Action) -> None:
        """Run a layer backward; add to its gradients, leave the gradient by its input."""
        layer, last = action.layer, len(self._context.graph.layers) - 1
        kept = self.kept.pop((layer, action.micro_batch))
        if kept.fetched and not kept.foreign:
            entry = next(ref for ref in action.frees if ref.content == f"a{layer}")
            self._context.memory.storages[self._context.key(entry, action)] = kept.fetched
        if layer == last:
            by_input = self._loss(kept, action)
        else:
            gradient = self._hidden(action.reads, f"d{layer}", action)
            if layer == 0:
                self._embedding_gradient(kept, gradient, action)
                return
            by_input = self._backward_block(kept, gradient, action)
        self._leave(action.writes, f"d{layer - 1}", action, by_input)

    def _forward_block(self, kept: Kept, x: Tensor, action: Action) -> Tensor:
        context = self._context
        if context.program.layers[action.layer].recompute is Recompute.FULL:
            kept.keep_input(x)
            with torch.no_grad():
                return self._block(self._parameters(action))(x)
        return self._record_block(kept, x, action)

    def _record_block(self, kept: Kept, x: Tensor, action: Action) -> Tensor:
        parameters = self._parameters(action, gradients=True)
        kept.parameters = list(parameters.values())
        kept.constants = self._constants
        again = self._context.program.layers[action.layer].recompute is Recompute.SELECTIVE
        cheap = kept.run_again if again else blocks.plainly
        return kept.record(self._block(parameters, cheap), x)

    def _backward_block(self, kept: Kept, gradient: Tensor, action: Action) -> Tensor:
        kept.weights = self._context.bytes_of(action.reads[0], action)
        if action.recompute is Recompute.FULL:
            again = Kept(weights=kept.weights)
            self._record_block(again, kept.fetched_input(), action)
            kept = again
        by_input, *by_parameters = kept.gradients(gradient)
        self._add(action, by_parameters)
        return by_input

    def _block(
        self, parameters: dict[str, Tensor], cheap: blocks.Run = blocks.plainly
    ) -> Callable[[Tensor], Tensor]:
        return lambda x: blocks.block(parameters, x, self._context.model, self._rope, cheap)

    def _embedding_gradient(self, kept: Kept, gradient: Tensor, action: Action) -> None:
        parameters = self._parameters(action, gradients=True)
        with torch.enable_grad():
            output = blocks.embedding(parameters, kept.kept_input(), self._context.model)
        gradients = torch.autograd.grad(output, list(parameters.values()), grad_outputs=gradient)
        self._add(action, gradients)

    def _loss(self, kept: Kept, action: Action) -> Tensor:
        """Loss and its gradients, a chunk of tokens at a time: never all logits at once."""
        context, x = self._context, kept.kept_input()
        targets, parameters = self._targets(action), self._head(action, gradients=True)
        fresh = {total for total in action.writes if total not in action.reads}
        by_input = torch.empty_like(x)
        for start, stop in _chunks(targets.numel(), context.graph.loss_chunk):
            piece = x.flatten(0, 1)[start:stop]
            by_input.flatten(0, 1)[start:stop] = self._loss_piece(
                action, parameters, (piece, targets[start:stop]), fresh
            )
            fresh.clear()
        return by_input

    def _loss_piece(
        self,
        action: Action,
        parameters: dict[str, Tensor],
        batch: tuple[Tensor, Tensor],
        fresh: set[Ref],
    ) -> Tensor:
        """The gradient by one chunk; those by the parameters are added up and gone at its end."""
        context, shared = self._context, self._context.graph.tied
        piece, targets = batch[0].detach().requires_grad_(), batch[1]
        with torch.enable_grad():
            loss = self._losses_of(parameters, piece, targets)
        scale = torch.full_like(loss, self._share * self.loss_scale)
        leaves = [piece, *parameters.values()]
        by_piece, *gradients = torch.autograd.grad(
            loss, leaves, grad_outputs=scale, allow_unused=shared
        )
        own = len(context.parameters(action.layer))
        sums = [(action.writes[0], action.layer, gradients[:own])]
        if shared:
            sums.append((action.writes[1], 0, gradients[own:]))
        for total, layer, parts in sums:
            self._accumulate(action, total, layer, parts, fresh=total in fresh)
        return by_piece

    def _targets(self, action: Action) -> Tensor:
        """int64 [micro_batch * sequence_length], on the device."""
        targets = self._batch(action.reads, action)[1]
        return targets.to(self._context.device, non_blocking=True).flatten()

    def _head(self, action: Action, *, gradients: bool) -> dict[str, Tensor]:
        """The loss layer's parameters, with the first layer's where they share a table."""
        context, parameters = self._context, self._parameters(action, gradients=gradients)
        if context.graph.tied:
            table = context.flat(action.reads[1], action, context.parameter_dtype)
            views = context.views(table, 0)
            parameters |= self._leaves(views) if gradients else views
        return parameters

    def _losses_of(self, parameters: dict[str, Tensor], x: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of x [tokens, h]; their part of the mean goes to `losses`."""
        loss = blocks.head_loss(parameters, x[None], targets[None], self._context.model)
        self.losses.append(loss.detach() * self._share)
        return loss

    def _parameters(self, action: Action, *, gradients: bool = False) -> dict[str, Tensor]:
        context = self._context
        flat = context.flat(action.reads[0], action, context.parameter_dtype)
        views = context.views(flat, action.layer)
        return self._leaves(views) if gradients else views

    @staticmethod
    def _leaves(views: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: view.detach().requires_grad_() for name, view in views.items()}

    def _add(self, action: Action, gradients: Sequence[Tensor]) -> None:
        """A layer's own gradients to its sum."""
        total = action.writes[0]
        fresh = total not in action.reads
        self._accumulate(action, total, action.layer, gradients, fresh=fresh)

    def _accumulate(
        self,
        action: Action,
        total: Ref,
        layer: int,
        gradients: Sequence[Tensor | None],
        *,
        fresh: bool,
    ) -> None:
        """Add gradients to a sum, or start it; None: the head shares a table, not positions."""
        context = self._context
        sums = context.views(context.flat(total, action, context.gradient_dtype), layer)
        for into, gradient in zip(sums.values(), gradients, strict=True):
            if gradient is None:
                if fresh:
                    into.zero_()
            elif fresh:
                into.copy_(gradient)
            else:
                into.add_(gradient)

    def _hidden(self, refs: Sequence[Ref], content: str, action: Action) -> Tensor:
        ref = next(ref for ref in refs if ref.content == content)
        tensor = self.hidden[self._context.key(ref, action)]
        assert isinstance(tensor, Tensor)
        return tensor

    def _leave(self, refs: Sequence[Ref], content: str, action: Action, output: Tensor) -> None:
        ref = next(ref for ref in refs if ref.content == content)
        self.hidden[self._context.key(ref, action)] = output


def _chunks(tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    for start in range(0, tokens, chunk):
        yield start, min(start + chunk, tokens)
