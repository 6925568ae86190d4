"""Causal attention whose values have fewer columns than queries and keys, as latent attention has.

Which kernel takes such heads:

    CUDA, 16 bits    cuDNN's, where it takes these widths: 192 and 128 on Hopper and Blackwell by
                     cuDNN 9.11 (torch's sdp_utils.cpp, check_cudnn_tensor_shapes)
    CUDA, fp32       torch's memory-efficient kernel
    otherwise        that of equal widths (fused.py): values are padded with zeros, and what it
                     gives is cut. That is FlashAttention-2 on other GPUs, and where the same bits
                     are wanted every time, which cuDNN does not promise.

Saved are queries, keys, values, the result and the sums of softmax, none of them padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.attention import cudnn
from bigplan.runtime.attention import fused as equal


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of q and k [b, s, heads, d] and v [b, s, heads, e], e <= d: [b, s, heads, e]."""
    return _Attention.apply(q, k, v, scale)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(Function):
    """Attention by the kernel that takes these heads."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        ctx.scale, ctx.by_cudnn = scale, cudnn.takes(heads)
        if ctx.by_cudnn:
            out, *others = cudnn.forward(heads, scale)
        else:
            out, *others = equal.forward(_padded(heads), scale, None)
        output: Tensor = out[..., : v.shape[-1]].transpose(1, 2).contiguous()
        tensors = [other if isinstance(other, Tensor) else None for other in others]
        ctx.numbers = [None if isinstance(other, Tensor) else other for other in others]
        ctx.save_for_backward(q, k, v, output, *tensors)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        q, k, v, output, *tensors = ctx.saved_tensors  # each may be asked for once
        others = [
            number if tensor is None else tensor
            for tensor, number in zip(tensors, ctx.numbers, strict=True)
        ]
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        gradient, out = (x.transpose(1, 2) for x in (gradients[0], output))
        if ctx.by_cudnn:
            found: Any = cudnn.backward(gradient, heads, (out, *others), ctx.scale)
        else:
            wide = _padded(heads)
            width = wide[-1].shape[-1]
            gradient, out = _widened(gradient, width), _widened(out, width)
            found = equal.backward(gradient, wide, (out, *others), ctx.scale, None)
        by_q, by_k, by_v = (x.transpose(1, 2) for x in found[:3])
        return by_q, by_k, by_v[..., : v.shape[-1]].contiguous(), None


def _padded(heads: Sequence[Tensor]) -> list[Tensor]:
    """With values as wide as queries, where the kernel wants that."""
    q, k, v = heads
    if q.is_cuda and q.dtype == torch.float32:
        return [q, k, v]
    return [q, k, _widened(v, q.shape[-1])]


def _widened(x: Tensor, width: int) -> Tensor:
    """[b, heads, s, fewer columns] with zeros up to `width`, a token's heads neighbours."""
    return F.pad(x.transpose(1, 2), (0, width - x.shape[-1])).transpose(1, 2)
