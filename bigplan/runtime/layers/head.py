"""The last layer: norm, scores of all words and loss, some tokens at a time.

Where pairs of responses are learned from (preference.py), the tokens' losses are taken first, and
once more with what each counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bigplan.runtime import generated
from bigplan.runtime.context import Context
from bigplan.runtime.layers import blocks
from bigplan.runtime.layers.kept import KeptActivations, differentiate
from bigplan.runtime.layers.leaves import differentiated, leaf_of, leaves_of, without
from bigplan.runtime.layers.losses import Losses
from bigplan.runtime.layers.preference import PairLoss
from bigplan.runtime.layers.products import Products
from bigplan.runtime.layers.visit import Batches, Visit
from bigplan.runtime.mixers.ways import PLAIN, Ways
from bigplan.runtime.parallel.tensor_parallel import ONE
from bigplan.runtime.parallel.words import Words, token_losses
from bigplan.spec.layers import TABLE

if TYPE_CHECKING:
    from bigplan.kernels.library import Library


class _Chunk(NamedTuple):
    """Some tokens of this rank, with the targets [n] of all ranks' that come together."""

    mine: slice
    targets: Tensor
    weights: Tensor | None  # what each counts, fp32 [n]; None: all alike


class Head:
    """Final norm, scores of all words and loss. It does all its work in its backward."""

    frozen = False  # then its backward gives the gradient by its input alone
    pairs: PairLoss | None = None  # what is learned from pairs; None: the next token

    def __init__(
        self,
        context: Context,
        batches: Batches,
        losses: Losses,
        *,
        in_product: bool,
        kernels: Library | None = None,
    ) -> None:
        """`in_product`: as in layers.Block."""
        self._kernels = kernels
        self._model, self._batches, self._losses = context.model, batches, losses
        self._chunk, self._tied = context.graph.loss_chunk, context.graph.tied
        self._in_product, self._ranks = in_product, context.tensor_parallel
        self._elsewhere = self._ranks.counted_elsewhere(self._model.steps("head"))

    def forward(self, visit: Visit, kept: KeptActivations) -> None:
        """Keeps the input."""
        kept.saved = [visit.hidden()]

    @torch.no_grad()
    def evaluate(self, visit: Visit) -> None:
        """The loss alone."""
        x, targets, parameters = visit.hidden(), self._batches.targets(visit), self._tables(visit)
        if self.pairs is not None:
            self.pairs.weights(visit, self._token_losses(parameters, x, targets), targets)
            return
        for chunk in self._chunks(targets):
            piece = x.flatten(0, -2)[chunk.mine]
            self._loss(parameters, piece, chunk, PLAIN._replace(kernels=self._kernels))

    def backward(self, visit: Visit, kept: KeptActivations) -> Tensor:
        """Loss and its gradients, a chunk of tokens at a time: never all logits at once."""
        x, targets = kept.kept_input(), self._batches.targets(visit)
        # Gathered tokens stay until the backward, which follows at once: products see no ranks.
        sums, parameters = kept.sums if self._in_product else None, self._tables(visit)
        products, weights = Products(ONE, sums, self._kernels, frozen=self.frozen), None
        if self.pairs is not None:
            weights = self.pairs.weights(visit, self._token_losses(parameters, x, targets), targets)
        if not self.frozen:
            parameters = leaves_of(parameters, in_product=self._in_product)
        visit.open(kept.sums)
        by_input = torch.empty_like(x)
        for chunk in self._chunks(targets, weights):
            piece = x.flatten(0, -2)[chunk.mine]
            by_piece, gradients = self._piece(parameters, piece, chunk, products)
            by_input.flatten(0, -2)[chunk.mine] = by_piece
            kept.sums.add(without(gradients, self._elsewhere))
        kept.sums.close()  # positions get no gradient here
        return by_input

    def _chunks(self, targets: Tensor, weights: Tensor | None = None) -> Iterator[_Chunk]:
        theirs = targets.view(self._ranks.parts, -1)
        counts = None if weights is None else weights.view_as(theirs)
        some = max(1, self._chunk // self._ranks.parts)
        for start in range(0, theirs.shape[1], some):
            mine = slice(start, start + some)
            count = None if counts is None else counts[:, mine].flatten()
            yield _Chunk(mine, theirs[:, mine].flatten(), count)

    @torch.no_grad()
    def _token_losses(self, parameters: dict[str, Tensor], x: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of every target [n], fp32 [n]; 0 where it does not count."""
        found = torch.empty(targets.shape, dtype=torch.float32, device=x.device)
        theirs = found.view(self._ranks.parts, -1)
        ways = PLAIN._replace(kernels=self._kernels, loss=self._each)
        for mine, wanted, _ in self._chunks(targets):
            piece = x.flatten(0, -2)[mine]
            losses = blocks.head_loss(parameters, piece, wanted, self._model, ways, self._ranks)
            theirs[:, mine] = losses.view(self._ranks.parts, -1)
        return found

    def _each(self, logits: Tensor, targets: Tensor) -> Tensor:
        words = Words(self._model.vocab, self._model.logit_cap)
        return token_losses(logits, targets, words, self._ranks)

    def _piece(
        self, parameters: dict[str, Tensor], x: Tensor, chunk: _Chunk, products: Products
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradients by one chunk, and those by the parameters that no product adds up."""
        x, leaves, ways = leaf_of(x), differentiated(parameters), products.ways
        share = self._losses.share * self._losses.scale
        generates = self._kernels is not None and self._ranks.alone and chunk.weights is None
        if generates and self._kernels is not None:  # its kernel multiplies by the share
            one = generated.scale_of(share, x.device)
            rule = generated.LossRule(self._kernels, one, self._model.logit_cap)
            ways = ways._replace(loss=partial(generated.cross_entropy, rule))
        with torch.enable_grad():
            loss = self._loss(parameters, x, chunk, ways)
        scale = torch.full_like(loss, share)
        by_x, *gradients = differentiate([loss], [x, *leaves.values()], [scale])
        return by_x, dict(zip(leaves, gradients, strict=True))

    def _loss(self, parameters: dict[str, Tensor], x: Tensor, chunk: _Chunk, ways: Ways) -> Tensor:
        """Sum of the losses of x [tokens, h], as they count; their part of the mean is the step's.

        Of pairs the loss is known already.
        """
        _, targets, weights = chunk
        if weights is not None:
            ways = ways._replace(loss=lambda *of: (self._each(*of) * weights).sum())
        loss = blocks.head_loss(parameters, x, targets, self._model, ways, self._ranks)
        if weights is None:
            self._losses.parts.append(loss.detach() * self._losses.share)
        return loss

    def _tables(self, visit: Visit) -> dict[str, Tensor]:
        """The layer's parameters, with the embedding's table where they share it."""
        parameters = visit.parameters()
        if self._tied:
            parameters[TABLE] = visit.parameters(1)[TABLE]
        return parameters
