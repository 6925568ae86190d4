"""cuDNN's causal attention of whole sequences, by torch's functions below
F.scaled_dot_product_attention.

It has no window there, and no promise of the same bits every time. On an H200 it takes 0.6 of
FlashAttention-2's time (heads of 64, benchmarks/results/2026-11-29-h200-whole-adapters).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend

aten = torch.ops.aten


def is_choice(heads: Sequence[Tensor]) -> bool:
    """Whether torch would take it for these [b, heads, s, d] and their gradients."""
    if not _may_take(heads):
        return False
    q, k, v = (x.detach().requires_grad_() for x in heads)
    chosen = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
    return chosen == SDPBackend.CUDNN_ATTENTION.value


def takes(heads: Sequence[Tensor]) -> bool:
    """Whether it takes queries, keys and values [b, heads, s, columns], and may."""
    q, k, v = heads
    params = SDPAParams(q, k, v, None, 0.0, True, False)
    return _may_take(heads) and bool(can_use_cudnn_attention(params))


def _may_take(heads: Sequence[Tensor]) -> bool:
    q, same_bits = heads[0], torch.are_deterministic_algorithms_enabled()
    return q.is_cuda and q.element_size() == 2 and not same_bits


def forward(heads: Sequence[Tensor], scale: float) -> tuple[Any, ...]:
    """The result [b, heads, s, d], sums of softmax [b, heads, s, 1], and what backward wants."""
    *found, _ = aten._scaled_dot_product_cudnn_attention(
        *heads, None, True, 0.0, True, False, scale=scale
    )
    return tuple(found)


def backward(
    gradient: Tensor, heads: Sequence[Tensor], results: Sequence[Any], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by queries, keys and values, of forward's results."""
    out, lse, *sums, seed, offset = results
    by_q, by_k, by_v = aten._scaled_dot_product_cudnn_attention_backward(
        gradient, *heads, out, lse, seed, offset, None, *sums, 0.0, True, scale=scale
    )
    return by_q, by_k, by_v
