"""Scores of a router that reads something else than the experts do, as in Gemma 4.

Tensor-parallel ranks gather all tokens of it, and have parts of the gradients by scores, as where
routers read what experts read (routed_rows.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.experts.dispatch import by_product, router_scores
from bigplan.runtime.experts.mixture import ROUTER, Mixture, by_matrix
from bigplan.spec.routing import Routing


class _OwnScores(Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[Mixture, Routing],
        x: Tensor,
        router: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.how, ctx.shape = how, x.shape
        mixture, routing = how
        ctx.save_for_backward(None if mixture.frozen else x, router)
        return router_scores(mixture.ranks.gather(x)().flatten(0, -2), router, routing, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, router = ctx.saved_tensors
        mixture, routing = ctx.how
        again = None if x is None else mixture.ranks.gather(x)
        by_scores = by_product(gradients[0], routing).to(router.dtype)
        summed = mixture.ranks.sum(by_scores @ router)
        by_router = by_bias = None
        if again is not None:
            by_router = by_matrix(mixture.sums, ROUTER, by_scores, again().flatten(0, -2))
            by_bias = by_scores.sum(0) if ctx.needs_input_grad[3] else None
        return None, summed().view(ctx.shape), by_router, by_bias


def own_scores(
    x: Tensor, router: Tensor, bias: Tensor | None, mixture: Mixture, routing: Routing
) -> Tensor:
    """Scores [tokens, experts] of what the router reads, x [..., h]."""
    return _OwnScores.apply((mixture, routing), x, router, bias)  # type: ignore[no-any-return, no-untyped-call]
