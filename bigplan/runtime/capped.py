"""Causal attention whose scores s become cap * tanh(s / cap), as in Gemma 2.

torch's fused kernels have no such scores. On CUDA a kernel caps those of 16-bit heads
(bigplan/kernels/attention.py). Elsewhere BLOCK queries and the keys that they see have their scores
in memory at a time, and the backward computes them again. Either way, saved are queries, keys,
values, the result and the sums of softmax, as with torch's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.mechanics import CAPPED_BLOCK as BLOCK
from bigplan.mechanics import caps_in_kernel
from bigplan.runtime import attention as fused


class Scores(NamedTuple):
    """What becomes of products of queries and keys."""

    scale: float
    cap: float
    window: int | None


def attention(q: Tensor, k: Tensor, v: Tensor, scores: Scores, *, generated: bool) -> Tensor:
    """As attention.attention, with capped scores; `generated`: by the kernel where it can."""
    if generated and caps_in_kernel(q.element_size(), q.shape[-1]):
        return _InKernel.apply(q, k, v, scores)  # type: ignore[no-any-return, no-untyped-call]
    return _InBlocks.apply(q, k, v, scores)  # type: ignore[no-any-return, no-untyped-call]


class _InKernel(Function):
    """The kernel that caps scores."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        from bigplan.kernels import attention as kernel

        *heads, scores = arguments
        q, k, v = (each.contiguous() for each in heads)
        window = fused.narrower(scores.window, q.shape[1])
        ctx.rule = kernel.ScoreRule(scores.scale, scores.cap, window)
        output, sums = kernel.forward((q, k, v), ctx.rule)
        ctx.save_for_backward(q, k, v, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        from bigplan.kernels import attention as kernel

        q, k, v, out, sums = ctx.saved_tensors  # each may be asked for once
        found = kernel.backward(gradients[0].contiguous(), (q, k, v), (out, sums), ctx.rule)
        return *found, None


class _InBlocks(Function):
    """Plain torch, some queries at a time. Sums of softmax are fp32 [b, heads, s]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        for rows, seen in _blocks(q.shape[1], scores.window):
            capped = _capped(q[:, rows], k[:, seen], scores).mul_(scores.cap)
            capped = capped.masked_fill_(_hidden(rows, seen, scores.window, q.device), -torch.inf)
            lse[:, :, rows] = sums = capped.logsumexp(-1)
            shares = capped.sub_(sums.unsqueeze(-1)).exp_().to(q.dtype)
            output[:, rows] = (shares @ _repeated(v[:, seen], q)).transpose(1, 2)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.scores = scores
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse = ctx.saved_tensors  # each may be asked for once
        scores, by_q = ctx.scores, torch.empty_like(q)
        by_k, by_v = (torch.zeros(x.shape, device=x.device) for x in (k, v))
        for rows, seen in _blocks(q.shape[1], scores.window):
            part = tuple(x[:, rows] for x in (q, output, gradients[0]))
            query, found, by_out = (x.transpose(1, 2) for x in part)
            delta = (found.float() * by_out.float()).sum(-1, keepdim=True)
            tanh = _capped(q[:, rows], k[:, seen], scores)
            shares = (tanh * scores.cap).sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
            shares.masked_fill_(_hidden(rows, seen, scores.window, q.device), 0.0)
            by_shares = (by_out @ _repeated(v[:, seen], q).mT).float()
            by_scores = tanh.square_().neg_().add_(1.0).mul_(scores.scale)
            by_scores = by_scores.mul_(shares).mul_(by_shares.sub_(delta)).to(q.dtype)
            by_v[:, seen] += _summed(shares.to(q.dtype).mT @ by_out, v.shape[2])
            by_k[:, seen] += _summed(by_scores.mT @ query, k.shape[2])
            by_q[:, rows] = (by_scores @ _repeated(k[:, seen], q)).transpose(1, 2)
        return by_q, by_k.to(k.dtype), by_v.to(v.dtype), None


def _blocks(length: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Some queries, and the keys that any of them sees."""
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        yield slice(first, last), slice(max(0, first + 1 - (window or length)), last)


def _hidden(rows: slice, seen: slice, window: int | None, device: torch.device) -> Tensor:
    """Where a query does not see a key, [queries, keys]."""
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j = torch.arange(seen.start, seen.stop, device=device)
    return (j > i) | (j <= i - window) if window else j > i


def _capped(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    """tanh(score / cap), fp32 [b, heads, queries, keys]."""
    product = q.transpose(1, 2) @ _repeated(k, q).mT
    return product.float().mul_(scores.scale / scores.cap).tanh_()


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [b, n, kv heads, d] for each head of queries, [b, heads, n, d]."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2)


def _summed(x: Tensor, heads: int) -> Tensor:
    """Gradients by repeated heads [b, repeated, n, d] as those by the heads, [b, n, heads, d]."""
    b, repeated, n, width = x.shape
    return x.view(b, heads, repeated // heads, n, width).float().sum(2).transpose(1, 2)
