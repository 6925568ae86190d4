"""FORWARD and BACKWARD of one layer on one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bigplan.graph.build import LOSS_CHUNK_TOKENS
from bigplan.graph.graph import Recompute
from bigplan.program import Action, Ref
from bigplan.runtime import blocks
from bigplan.runtime.context import Context
from bigplan.runtime.data import Prefetcher
from bigplan.runtime.kept import Kept


class Compute:
    """The layers of one rank. Hidden states between layers and what layers keep live here."""

    def __init__(self, context: Context, batches: Prefetcher) -> None:
        self._context = context
        self._batches = batches
        self._targets: dict[int, Tensor] = {}
        self.hidden = context.memory.dynamic
        self.kept: dict[tuple[int, int], Kept] = {}
        self.losses: list[Tensor] = []
        self.step = 0
        training = context.training
        self._rope = blocks.rope_table(
            context.model, training.sequence_length, context.device, context.parameter_dtype
        )
        self._constants = frozenset(t.untyped_storage().data_ptr() for t in self._rope)
        # Every micro-batch's loss is a mean; the step's is the mean over micro-batches and ranks.
        self._share = 1.0 / (context.graph.micro_batches * context.world)

    def forward(self, action: Action) -> None:
        """Run a layer forward; leave its output and what it keeps."""
        context, layer = self._context, action.layer
        kept = Kept(weights=context.bytes_of(action.reads[0], action))
        self.kept[layer, action.micro_batch] = kept
        if layer == 0:
            tokens, targets = self._batches.take(self.step, action.micro_batch)
            tokens = tokens.to(context.device, non_blocking=True)
            self._targets[action.micro_batch] = targets
            kept.saved = [tokens]
            with torch.no_grad():
                output = blocks.embedding(self._parameters(action), tokens)
        else:
            x = self._hidden(action.reads, f"h{layer - 1}", action)
            if layer == len(context.graph.layers) - 1:
                kept.saved = [x]  # the loss layer does all its work in its backward
                return
            output = self._forward_block(kept, x, action)
        self._leave(action.writes, f"h{layer}", action, output)

    def backward(self, action: Action) -> None:
        """Run a layer backward; add to its gradients, leave the gradient by its input."""
        layer, last = action.layer, len(self._context.graph.layers) - 1
        kept = self.kept.pop((layer, action.micro_batch))
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
        return kept.record(self._block(parameters), x, self._constants)

    def _backward_block(self, kept: Kept, gradient: Tensor, action: Action) -> Tensor:
        kept.weights = self._context.bytes_of(action.reads[0], action)
        if action.recompute is Recompute.FULL:
            again = Kept(weights=kept.weights)
            self._record_block(again, kept.fetched_input(), action)
            kept = again
        by_input, *by_parameters = kept.gradients(gradient)
        self._add(action, by_parameters)
        return by_input

    def _block(self, parameters: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: blocks.block(parameters, x, self._context.model, self._rope)

    def _embedding_gradient(self, kept: Kept, gradient: Tensor, action: Action) -> None:
        parameters = self._parameters(action, gradients=True)
        with torch.enable_grad():
            output = blocks.embedding(parameters, kept.kept_input())
        gradients = torch.autograd.grad(output, list(parameters.values()), grad_outputs=gradient)
        self._add(action, gradients)

    def _loss(self, kept: Kept, action: Action) -> Tensor:
        """Loss and its gradients, a chunk of tokens at a time: never all logits at once."""
        context, x = self._context, kept.kept_input()
        targets = self._targets.pop(action.micro_batch).to(context.device, non_blocking=True)
        parameters = self._parameters(action, gradients=True)
        shared = context.graph.tied
        if shared:
            table = context.flat(action.reads[1], action, context.parameter_dtype)
            parameters |= self._leaves(context.views(table, 0))
        fresh = {total for total in action.writes if total not in action.reads}
        tokens = targets.numel()
        by_input = torch.empty_like(x)
        for start in range(0, tokens, LOSS_CHUNK_TOKENS):
            stop = min(start + LOSS_CHUNK_TOKENS, tokens)
            piece = x.flatten(0, 1)[start:stop].detach().requires_grad_()
            with torch.enable_grad():
                loss = blocks.head_loss(
                    parameters, piece[None], targets.flatten()[None, start:stop], context.model
                )
            share = (stop - start) / tokens
            scale = torch.full_like(loss, self._share * share)
            leaves = [piece, *parameters.values()]
            by_piece, *gradients = torch.autograd.grad(loss, leaves, grad_outputs=scale)
            by_input.flatten(0, 1)[start:stop] = by_piece
            own = len(context.parameters(action.layer))
            sums = [(action.writes[0], action.layer, gradients[:own])]
            if shared:
                sums.append((action.writes[1], 0, gradients[own:]))
            for total, layer, parts in sums:
                self._accumulate(action, total, layer, parts, fresh=total in fresh)
            fresh.clear()
            self.losses.append(loss.detach() * (self._share * share))
        return by_input

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
        self, action: Action, total: Ref, layer: int, gradients: Sequence[Tensor], *, fresh: bool
    ) -> None:
        """Add gradients to a sum, or start it."""
        context = self._context
        sums = context.views(context.flat(total, action, context.gradient_dtype), layer)
        for into, gradient in zip(sums.values(), gradients, strict=True):
            if fresh:
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
