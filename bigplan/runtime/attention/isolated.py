"""Causal attention within documents: a token attends to tokens of its own document alone.

Documents of any number and length are told by a tensor of one shape, `bounds` int32 [b, 2, s]
(bigplan/data/documents.py). On CUDA the kernel of biased and capped scores takes 16-bit heads
(bigplan/kernels/handwritten/attention.py); it skips tiles of scores that documents hide. Wider
heads are products with kernels between them (by_products.py). Elsewhere plain torch takes some
queries at a time (in_blocks.py). The first and the last know linear biases, caps and windows. Sinks
are counted in the result, as in sinks.py. The kernel's values are as wide as its keys: those of
latent attention are padded for it. Saved are queries, keys, values, the result and the sums of
softmax.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bigplan import mechanics
from bigplan.runtime.attention import by_products, fused, in_blocks
from bigplan.runtime.attention.in_blocks import Heads, Scores


def attention(
    heads: Heads, scores: Scores, sinks: Tensor | None = None, *, generated: bool
) -> Tensor:
    """Attention of q and k [b, s, heads, d] and v [b, s, heads, e], e <= d: [b, s, heads, e].

    Keys and values may have fewer heads. `scores` have bounds; `sinks` [heads] of these heads of
    queries. `generated`: by the kernel where it can.
    """
    assert scores.bounds is not None, "one document needs no bounds"
    q = heads[0]
    plain = sinks is None and scores.cap is None and scores.slopes is None
    plain = plain and heads[2].shape[-1] == q.shape[-1]
    if generated and plain and mechanics.by_products(q.element_size(), q.shape[-1]):
        return by_products.attention(*heads, scores)
    by_kernel = generated and mechanics.isolates_in_kernel(q.element_size(), q.shape[-1])
    how = _InKernel if by_kernel else _InBlocks
    return _Attention.apply(*heads, sinks, how(scores))  # type: ignore[no-any-return, no-untyped-call]


class _InBlocks:
    """Plain torch. Sums are natural logarithms."""

    base = 1.0  # sums over natural logarithms

    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def forward(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """The result, and the logarithm of softmax's sums, fp32 [b, heads, s]."""
        return in_blocks.forward(heads, self._scores)

    def backward(self, gradient: Tensor, heads: Heads, results: tuple[Tensor, Tensor]) -> Heads:
        """Gradients by the heads, of forward's results."""
        return in_blocks.backward(gradient, heads, results, self._scores)


class _InKernel:
    """The generated kernel. Sums are logarithms to base 2."""

    base = math.log2(math.e)

    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def _rule(self, length: int) -> Any:
        from bigplan.kernels.handwritten.attention import ScoreRule

        scores = self._scores
        return ScoreRule(scores.scale, scores.cap, fused.narrower(scores.window, length))

    def forward(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """As _InBlocks'."""
        from bigplan.kernels.handwritten import attention as kernel

        q, k, v = heads
        slopes, bounds = self._scores.slopes, self._scores.bounds
        wide = q, k, _widened(v, q.shape[-1])
        out, sums = kernel.forward(wide, self._rule(q.shape[1]), slopes, bounds=bounds)
        return out[..., : v.shape[-1]].contiguous(), sums

    def backward(self, gradient: Tensor, heads: Heads, results: tuple[Tensor, Tensor]) -> Heads:
        """As _InBlocks'."""
        from bigplan.kernels.handwritten import attention as kernel

        (q, k, v), (out, sums) = heads, results
        slopes, bounds = self._scores.slopes, self._scores.bounds
        gradient, out, wide = (_widened(x, q.shape[-1]) for x in (gradient, out, v))
        by_q, by_k, by_v = kernel.backward(
            gradient.contiguous(),
            (q, k, wide),
            (out, sums),
            self._rule(q.shape[1]),
            slopes,
            bounds=bounds,
        )
        return by_q, by_k, by_v[..., : v.shape[-1]].contiguous()


class _Attention(Function):
    """Attention by one of the two, and sinks counted in its result."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *heads, sinks, how = arguments
        q, k, v = (each.contiguous() for each in heads)
        out, lse = how.forward((q, k, v))
        if sinks is not None:
            sums = lse / how.base
            whole = torch.logaddexp(sums, sinks.to(lse.dtype)[:, None])
            out.mul_(sums.sub_(whole).exp_().transpose(1, 2)[..., None])
            lse = whole.mul_(how.base)
        ctx.how = how
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        output: Tensor = out
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors  # each may be asked for once
        by_sinks, gradient = None, gradients[0]
        if sinks is not None and ctx.needs_input_grad[3]:
            products = (out * gradient).sum(-1, dtype=lse.dtype).transpose(1, 2)
            shares = (sinks.to(lse.dtype)[:, None] - lse / ctx.how.base).exp_()
            by_sinks = shares.mul_(products).sum((0, 2)).neg_().to(sinks.dtype)
        found = ctx.how.backward(gradient, (q, k, v), (out, lse))
        return *found, by_sinks, None


def _widened(x: Tensor, width: int) -> Tensor:
    """With columns of zeros up to `width`."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
