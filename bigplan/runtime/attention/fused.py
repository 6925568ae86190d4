"""Causal attention by torch's fused kernels, of a whole sequence or within a sliding window.

Saved are queries, keys, values, the result and the sums of softmax, with a window or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bigplan import mechanics
from bigplan.runtime.attention import by_products, cudnn
from bigplan.runtime.attention import window as windowed
from bigplan.runtime.attention.in_blocks import Scores

aten = torch.ops.aten


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    scale: float | None = None,
    *,
    generated: bool = False,
) -> Tensor:
    """Causal attention of q [b, s, heads, d], k and v [b, s, kv heads, d]: [b, s, heads, d].

    With a window of fewer than s tokens, a token sees so many: itself and those just before it.
    `scale`: factor of products of queries and keys; None: 1 / root of d. `generated`: heads that no
    flash kernel takes by products and kernels between them.
    """
    within = narrower(window, q.shape[1])
    if generated and mechanics.by_products(q.element_size(), q.shape[-1]):
        return by_products.attention(q, k, v, Scores(scale or q.shape[-1] ** -0.5, within))
    if within is not None or _without_flash(q):
        return _Windowed.apply(q, k, v, within, scale or q.shape[-1] ** -0.5)  # type: ignore[no-any-return, no-untyped-call]
    # The transposes stay views: the kernels answer in q's layout, [b, s, heads, d] in memory, so
    # flattening copies nothing and o_proj saves the storage that attention saves.
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True,
        scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2)


def narrower(window: int | None, length: int) -> int | None:
    """The window, if it hides a token of a sequence of this length; else None."""
    return window if window is not None and window < length else None


class _Windowed(Function):
    """Attention within a window, or without one by the kernel for heads that flash has none for.

    torch's own choice for grouped heads would write all scores there.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float
    ) -> Tensor:
        heads = [each.transpose(1, 2) for each in (q, k, v)]
        out, *others = windowed.forward(heads, scale, window)
        output: Tensor = out.transpose(1, 2)
        ctx.save_for_backward(q, k, v, output, *others)
        ctx.window, ctx.scale = window, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        q, k, v, output, *others = ctx.saved_tensors  # each may be asked for once
        heads = [each.transpose(1, 2) for each in (q, k, v)]
        by_output, output = (each.transpose(1, 2) for each in (gradients[0], output))
        found = windowed.backward(by_output, heads, (output, *others), ctx.scale, ctx.window)
        return *(each.transpose(1, 2) for each in found), None, None


# torch's own functions below F.scaled_dot_product_attention, with their backward, for those who
# save other tensors than autograd would. Tensors are [b, heads, s, d].


def forward(heads: Sequence[Tensor], scale: float, window: int | None) -> Any:
    """The result of queries, keys and values, and what the backward wants besides."""
    within = narrower(window, heads[0].shape[2])
    if within is not None or _without_flash(heads[0]):
        return windowed.forward(heads, scale, within)
    if not heads[0].is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True, scale=scale)
    if heads[0].dtype == torch.float32:  # which flash attention has no kernel for
        return aten._scaled_dot_product_efficient_attention(
            *heads, None, True, 0.0, True, scale=scale
        )
    if cudnn.is_choice(heads):
        return cudnn.forward(heads, scale)
    wide, width = map(_aligned, heads), heads[0].shape[-1]
    out, *others, _ = aten._scaled_dot_product_flash_attention(*wide, 0.0, True, scale=scale)
    return out[..., :width], *others


def _without_flash(q: Tensor) -> bool:
    """Whether a CUDA device has no FlashAttention-2 for these heads of 16 bits.

    They are wider than 256 columns, or the GPU is older than Ampere. The memory-efficient kernel
    takes them, with a window or without.
    """
    return q.is_cuda and q.element_size() == 2 and not windowed.has_flash(q)


def backward(
    gradient: Tensor,
    heads: Sequence[Tensor],
    results: Sequence[Any],
    scale: float,
    window: int | None,
) -> Any:
    """Gradients by queries, keys and values, first, of forward's results."""
    within = narrower(window, heads[0].shape[2])
    if within is not None or _without_flash(heads[0]):
        return windowed.backward(gradient, heads, results, scale, within)
    if not gradient.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *heads, *results, 0.0, True, scale=scale
        )
    if gradient.dtype == torch.float32:
        wanted = (True, True, True, False)
        return aten._scaled_dot_product_efficient_attention_backward(
            gradient, *heads, None, *results, 0.0, wanted, True, scale=scale
        )
    if cudnn.is_choice(heads):
        return cudnn.backward(gradient, heads, results, scale)
    out, *sums, seed, offset = results
    gradient, out, *wide = map(_aligned, (gradient, out, *heads))
    found = aten._scaled_dot_product_flash_attention_backward(
        gradient, *wide, out, *sums, 0.0, True, seed, offset, scale=scale
    )
    return [each[..., : heads[0].shape[-1]] for each in found]


def _aligned(x: Tensor) -> Tensor:
    """With columns of zeros up to what FlashAttention-2 takes."""
    missing = -x.shape[-1] % windowed.ALIGNED
    return F.pad(x, (0, missing)) if missing else x
