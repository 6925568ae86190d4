"""Causal attention whose scores s become cap * tanh(s / cap), as in Gemma 2.

torch's fused kernels have no such scores. On CUDA a kernel caps those of 16-bit heads
(bigplan/kernels/handwritten/attention.py). Elsewhere plain torch takes some queries at a time
(in_blocks.py). Either way, saved are queries, keys, values, the result and the sums of softmax, as
with torch's kernels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from bigplan.mechanics import caps_in_kernel
from bigplan.runtime.attention import fused, in_blocks
from bigplan.runtime.attention.in_blocks import Scores


def attention(q: Tensor, k: Tensor, v: Tensor, scores: Scores, *, generated: bool) -> Tensor:
    """As attention.attention, with capped scores; `generated`: by the kernel where it can."""
    if generated and caps_in_kernel(q.element_size(), q.shape[-1]):
        return _InKernel.apply(q, k, v, scores)  # type: ignore[no-any-return, no-untyped-call]
    return _InBlocks.apply(q, k, v, scores)  # type: ignore[no-any-return, no-untyped-call]


class _InKernel(Function):
    """The kernel that caps scores."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        from bigplan.kernels.handwritten import attention as kernel

        *heads, scores = arguments
        q, k, v = (each.contiguous() for each in heads)
        window = fused.narrower(scores.window, q.shape[1])
        ctx.rule = kernel.ScoreRule(scores.scale, scores.cap, window)
        output, sums = kernel.forward((q, k, v), ctx.rule)
        ctx.save_for_backward(q, k, v, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        from bigplan.kernels.handwritten import attention as kernel

        q, k, v, out, sums = ctx.saved_tensors  # each may be asked for once
        found = kernel.backward(gradients[0].contiguous(), (q, k, v), (out, sums), ctx.rule)
        return *found, None


class _InBlocks(Function):
    """Plain torch, some queries at a time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        output, lse = in_blocks.forward((q, k, v), scores)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.scores = scores
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse = ctx.saved_tensors  # each may be asked for once
        found = in_blocks.backward(gradients[0], (q, k, v), (output, lse), ctx.scores)
        return *found, None
