"""Attention with linear biases (ALiBi: Press, Smith and Lewis 2022, "Train short, test long").

Head h adds slope(h) * (j - i) to the score of query i and key j. No [s, s] mask is ever in memory.

On CUDA a kernel of 16-bit heads adds the biases (bigplan/kernels/handwritten/attention.py).
Elsewhere any fused causal kernel does. Softmax ignores a term that all keys share, so slope(h) * j
has the same effect, and this bias is a product of a factor of the head and a factor of the key. So
heads get ALIBI_COLUMNS more columns: queries have the slope there, and keys have their place. Saved
tensors are not wider, because the backward widens them again.

Both factors are sums of numbers that 16-bit formats hold: slopes of two parts (16 bits in bf16, 22
in fp16), places of three digits. A slope is then off by 2^-17 of itself at most. The kernel has
slopes in fp32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bigplan.mechanics import ALIBI_COLUMNS, biases_in_kernel
from bigplan.runtime.attention import fused

DIGIT = 256  # places are written in digits that bf16, of 8 bits, holds
DIGITS, PARTS = 3, 2  # of a place, for up to 2^24 tokens; of a slope


class Biases(NamedTuple):
    """What attention knows positions by."""

    by_place: Tensor  # columns appended to keys, [s, ALIBI_COLUMNS]
    by_head: Tensor  # and to queries, [heads, ALIBI_COLUMNS]
    slopes: Tensor  # of heads, fp32 [heads]

    def of_rank(self, rank: int, ranks: int) -> Biases:
        """Those of the heads of one of several tensor-parallel ranks."""
        return Biases(self.by_place, *(each.chunk(ranks)[rank] for each in self[1:]))


def slopes(heads: int) -> Tensor:
    """Slope of each of `heads` heads, fp64 [heads]: 2^(-8 / n), 2^(-16 / n), ... for n = 2^k heads.

    Others have those of the largest n below, then every other one of 2 n, as in the authors' code.
    """
    below = 1 << (heads.bit_length() - 1)
    found = [2.0 ** (-8.0 * (i + 1) / below) for i in range(below)]
    found += [2.0 ** (-8.0 * (i + 1) / (2 * below)) for i in range(0, 2 * (heads - below), 2)]
    return torch.tensor(found, dtype=torch.float64)


def biases(
    heads: int, head_dim: int, length: int, device: torch.device | str, dtype: torch.dtype
) -> Biases:
    """The biases of sequences of a length, with columns in `dtype`.

    Scores are divided by sqrt(head_dim), so slopes are multiplied by it in columns. A digit's
    weight is shared out to both sides, which keeps 16-bit floats in range.
    """
    assert length <= DIGIT**DIGITS, length
    left, parts = slopes(heads) * math.sqrt(head_dim), list[Tensor]()
    for _ in range(PARTS):
        parts.append(left.to(dtype).double())
        left = left - parts[-1]
    place, root = torch.arange(length), math.isqrt(DIGIT)
    by_head, by_place = torch.zeros(heads, ALIBI_COLUMNS), torch.zeros(length, ALIBI_COLUMNS)
    for n in range(DIGITS):
        for i, part in enumerate(parts):
            by_head[:, n * PARTS + i] = part * root**n
            by_place[:, n * PARTS + i] = (place // DIGIT**n % DIGIT) * root**n
    columns = by_place.to(device, dtype), by_head.to(device, dtype)
    return Biases(*columns, slopes(heads).to(device, torch.float32))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    biases: Biases,
    window: int | None = None,
    *,
    generated: bool = False,
) -> Tensor:
    """Causal attention of q [b, s, heads, d], k and v [b, s, kv heads, d]: [b, s, heads, d].

    `biases` are those of these heads; `window` as in attention.attention. `generated`: by the
    kernel, where it takes such heads. Saves q, k, v, the result and the sums of softmax.
    """
    if generated and biases_in_kernel(q.element_size(), q.shape[-1]):
        return _InKernel.apply(q, k, v, biases.slopes, window)  # type: ignore[no-any-return, no-untyped-call]
    return _ByWiderHeads.apply(q, k, v, *biases[:2], window)  # type: ignore[no-any-return, no-untyped-call]


class _InKernel(Function):
    """The kernel that adds biases to scores."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        from bigplan.kernels.handwritten import attention as kernel

        *heads, slopes, window = arguments
        q, k, v = (each.contiguous() for each in heads)
        within = fused.narrower(window, q.shape[1])
        ctx.rule = kernel.ScoreRule(q.shape[-1] ** -0.5, window=within)
        output, sums = kernel.forward((q, k, v), ctx.rule, slopes)
        ctx.save_for_backward(q, k, v, slopes, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        from bigplan.kernels.handwritten import attention as kernel

        q, k, v, slopes, *results = ctx.saved_tensors  # each may be asked for once
        by_out, results = gradients[0].contiguous(), (results[0], results[1])
        found = kernel.backward(by_out, (q, k, v), results, ctx.rule, slopes)
        return *found, None, None


class _ByWiderHeads(Function):
    """The fused kernel on widened heads."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, ctx.window = arguments
        width = inputs[0].shape[-1]
        wide, *others = fused.forward(_widened(*inputs), width**-0.5, ctx.window)
        output: Tensor = wide.transpose(1, 2)[..., :width].contiguous()
        tensors = [other if isinstance(other, Tensor) else None for other in others]
        ctx.numbers = [None if isinstance(other, Tensor) else other for other in others]
        ctx.save_for_backward(*inputs, output, *tensors)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # each may be asked for once
        inputs, output, tensors = saved[:5], saved[5], saved[6:]
        width = output.shape[-1]
        others = [
            number if tensor is None else tensor
            for tensor, number in zip(tensors, ctx.numbers, strict=True)
        ]
        by_output, output = (_with_zeros(each).transpose(1, 2) for each in (gradients[0], output))
        results = output, *others
        found = fused.backward(by_output, _widened(*inputs), results, width**-0.5, ctx.window)
        by_q, by_k, by_v = (each.transpose(1, 2)[..., :width] for each in found[:3])
        return by_q, by_k, by_v, None, None, None


def _widened(q: Tensor, k: Tensor, v: Tensor, by_place: Tensor, by_head: Tensor) -> list[Tensor]:
    """Queries, keys and values with more columns, [b, heads, s, d + ALIBI_COLUMNS] each."""
    wide = (
        torch.cat((q, by_head.expand(*q.shape[:-1], -1)), dim=-1),
        torch.cat((k, by_place.unsqueeze(1).expand(*k.shape[:-1], -1)), dim=-1),
        _with_zeros(v),
    )
    return [each.transpose(1, 2) for each in wide]


def _with_zeros(x: Tensor) -> Tensor:
    return F.pad(x, (0, ALIBI_COLUMNS))
