"""An RMSNorm of columns that tensor-parallel ranks share out: OLMo 2's queries or keys.

A rank needs one number a token of each other rank: its mean of squares forward, and its part of the
projection backward. Ranks that have the same heads count these equally often, so the mean of the
ranks' means is that of all columns. In the backward each of them has a part of the gradient by what
they share, and takes such a part of the projection off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.operators import RmsRule
from bigplan.runtime.parallel.group import RankGroup


class _WideNorm(Function):
    """As operators.rms_norm, of a rank's columns; saves x and rstd (fp32 [..., 1])."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rule: RmsRule, group: RankGroup) -> Tensor:
        wide = x.float()
        squares = _mean_of_all(wide.square().mean(-1, keepdim=True), group)
        rstd = torch.rsqrt(squares + rule.epsilon)
        ctx.rule, ctx.group = rule, group
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd * rule.factors(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        gradient, normed, by_weight = gradients[0].float(), x.float() * rstd, None
        if ctx.needs_input_grad[1]:
            by_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)
        gradient = gradient * ctx.rule.factors(weight)
        projection = _mean_of_all((gradient * normed).mean(-1, keepdim=True), ctx.group)
        return (rstd * (gradient - normed * projection)).to(x.dtype), by_weight, None, None


def _mean_of_all(mean: Tensor, group: RankGroup) -> Tensor:
    return group.reduced(mean)() / group.size


def wide_norm(x: Tensor, weight: Tensor, rule: RmsRule, group: RankGroup) -> Tensor:
    """RMSNorm over the columns of all ranks, of a rank's x [..., w] with its part of the weight."""
    return _WideNorm.apply(x, weight, rule, group)  # type: ignore[no-any-return, no-untyped-call]
