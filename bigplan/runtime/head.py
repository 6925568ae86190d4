"""The last layer: norm, scores of all words and loss, some tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bigplan.runtime import blocks, generated
from bigplan.runtime.context import Context
from bigplan.runtime.kept import KeptActivations, differentiate
from bigplan.runtime.leaves import differentiated, leaf_of, leaves_of, without
from bigplan.runtime.products import Products
from bigplan.runtime.tensor_parallel import ONE
from bigplan.runtime.visit import Batches, Visit
from bigplan.runtime.ways import PLAIN, Ways
from bigplan.spec.layers import TABLE

if TYPE_CHECKING:
    from bigplan.kernels.library import Library


@dataclass(slots=True)
class Losses:
    """The loss of a step, in parts, and the factors of its gradients."""

    parts: list[Tensor] = field(default_factory=list)  # their sum is the mean over the targets
    share: float = 0.0  # weight of one target in the step's mean, over all ranks
    scale: float = 1.0  # factor of gradients, not of reported losses


class Head:
    """Final norm, scores of all words and loss. It does all its work in its backward."""

    frozen = False  # then its backward gives the gradient by its input alone

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
        for mine, wanted in self._chunks(targets):
            piece = x.flatten(0, -2)[mine]
            self._loss(parameters, piece, wanted, PLAIN._replace(kernels=self._kernels))

    def backward(self, visit: Visit, kept: KeptActivations) -> Tensor:
        """Loss and its gradients, a chunk of tokens at a time: never all logits at once."""
        x, targets = kept.kept_input(), self._batches.targets(visit)
        # Gathered tokens stay until the backward, which follows at once: products see no ranks.
        sums, parameters = kept.sums if self._in_product else None, self._tables(visit)
        products = Products(ONE, sums, self._kernels, frozen=self.frozen)
        if not self.frozen:
            parameters = leaves_of(parameters, in_product=self._in_product)
        visit.open(kept.sums)
        by_input = torch.empty_like(x)
        for mine, wanted in self._chunks(targets):
            piece = x.flatten(0, -2)[mine]
            by_piece, gradients = self._piece(parameters, piece, wanted, products)
            by_input.flatten(0, -2)[mine] = by_piece
            kept.sums.add(without(gradients, self._elsewhere))
        kept.sums.close()  # positions get no gradient here
        return by_input

    def _chunks(self, targets: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Tokens of this rank, with the targets of all ranks' that come together."""
        theirs = targets.view(self._ranks.parts, -1)
        some = max(1, self._chunk // self._ranks.parts)
        for start in range(0, theirs.shape[1], some):
            mine = slice(start, start + some)
            yield mine, theirs[:, mine].flatten()

    def _piece(
        self, parameters: dict[str, Tensor], x: Tensor, targets: Tensor, products: Products
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradients by one chunk, and those by the parameters that no product adds up."""
        x, leaves, ways = leaf_of(x), differentiated(parameters), products.ways
        share = self._losses.share * self._losses.scale
        if self._kernels is not None and self._ranks.alone:  # its kernel multiplies by the share
            one = generated.scale_of(share, x.device)
            rule = generated.LossRule(self._kernels, one, self._model.logit_cap)
            ways = ways._replace(loss=partial(generated.cross_entropy, rule))
        with torch.enable_grad():
            loss = self._loss(parameters, x, targets, ways)
        scale = torch.full_like(loss, share)
        by_x, *gradients = differentiate([loss], [x, *leaves.values()], [scale])
        return by_x, dict(zip(leaves, gradients, strict=True))

    def _loss(
        self,
        parameters: dict[str, Tensor],
        x: Tensor,
        targets: Tensor,
        ways: Ways,
    ) -> Tensor:
        """Sum of the losses of x [tokens, h]; their part of the mean goes to the step's."""
        loss = blocks.head_loss(parameters, x, targets, self._model, ways, self._ranks)
        self._losses.parts.append(loss.detach() * self._losses.share)
        return loss

    def _tables(self, visit: Visit) -> dict[str, Tensor]:
        """The layer's parameters, with the embedding's table where they share it."""
        parameters = visit.parameters()
        if self._tied:
            parameters[TABLE] = visit.parameters(1)[TABLE]
        return parameters
