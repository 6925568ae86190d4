"""Causal attention whose softmax counts a trained logit of each head, as in GPT-OSS: a sink.

With the result O and the logarithm of sums L of usual attention, and a head's sink S,

    L' = log(exp(L) + exp(S)),    O' = O exp(L - L')

are those with the sink, and the usual backward of O' and L' has the gradients by queries, keys and
values: it makes probabilities of scores and L', and takes rows of O' times its gradient off. So
torch's kernels serve as they are, with a window or without. The gradient by a sink is the sum over
queries of -exp(S - L') (O' . dO'). Saved is what attention saves without sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.attention import fused


def attention(
    heads: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor,
    window: int | None,
    scale: float,
    *,
    generated: bool = False,
) -> Tensor:
    """As attention.attention of q, k and v, with sinks [heads] of these heads of queries.

    `generated`: sinks are counted by a kernel, where results have 16 bits.
    """
    by_kernel = generated and heads[0].element_size() == 2
    return _Attention.apply(*heads, sinks, window, scale, by_kernel)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(Function):
    """The fused kernel, whose results are scaled in place."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        q, k, v, sinks, ctx.window, ctx.scale, by_kernel = arguments
        heads = [each.transpose(1, 2) for each in (q, k, v)]
        out, lse, *others = fused.forward(heads, ctx.scale, ctx.window)
        output: Tensor = out.transpose(1, 2)
        _count_(output, _of_queries(lse, q), sinks, by_kernel=by_kernel)
        tensors = [other if isinstance(other, Tensor) else None for other in others]
        ctx.numbers = [None if isinstance(other, Tensor) else other for other in others]
        ctx.save_for_backward(q, k, v, sinks, output, lse, *tensors)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, output, lse, *tensors = ctx.saved_tensors  # each may be asked for once
        others = [
            number if tensor is None else tensor
            for tensor, number in zip(tensors, ctx.numbers, strict=True)
        ]
        by_sinks = None
        if ctx.needs_input_grad[3]:
            products = (output * gradients[0]).sum(-1, dtype=lse.dtype).transpose(1, 2)
            shares = (sinks.to(lse.dtype)[:, None] - _of_queries(lse, q)).exp_()
            by_sinks = shares.mul_(products).sum((0, 2)).neg_().to(sinks.dtype)
        heads = [each.transpose(1, 2) for each in (q, k, v)]
        by_output, out = (each.transpose(1, 2) for each in (gradients[0], output))
        found = fused.backward(by_output, heads, (out, lse, *others), ctx.scale, ctx.window)
        return *(each.transpose(1, 2) for each in found[:3]), by_sinks, None, None, None


def _count_(output: Tensor, sums: Tensor, sinks: Tensor, *, by_kernel: bool) -> None:
    """Count sinks [heads] in a result [b, s, heads, d] and its sums [b, heads, s]."""
    if by_kernel and output.is_contiguous() and sums.is_contiguous():
        from bigplan.kernels.handwritten import sinks as kernel

        kernel.count_(output, sums, sinks)
        return
    whole = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
    output.transpose(1, 2).mul_((sums - whole).exp_()[..., None])
    sums.copy_(whole)


def _of_queries(lse: Tensor, q: Tensor) -> Tensor:
    """A view [b, heads, s]: cuDNN gives [b, heads, s, 1], the memory-efficient kernel more."""
    return lse.flatten(2)[:, :, : q.shape[1]]
