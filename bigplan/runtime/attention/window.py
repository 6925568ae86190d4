"""Kernels of attention within a sliding window, forward and backward.

Within a window of w tokens a token sees itself and the w - 1 tokens before it, as in the masks of
Hugging Face's Mistral and Phi-3 (transformers, masking_utils.sliding_window_overlay). No mask of
sequence x sequence is ever in memory:

    CUDA, 16 bits    FlashAttention-2
    CUDA, otherwise  torch's memory-efficient kernel
    CPU              the CPU's kernel over BLOCK queries and the band of keys that they see; all
                     blocks take their part of one mask of [BLOCK, BLOCK + w - 1]

Tensors are [b, heads, s, d]; keys and values may have fewer heads. Windows are shorter than s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.mechanics import WIDEST_FLASH

aten = torch.ops.aten

# Queries that pass the CPU's kernel together: of the keys of their band, each query sees all but
# BLOCK - 1, which are 3% of a window of 4,096.
BLOCK = 128
ALIGNED = 8  # columns: CUDA's kernels load 16 bytes at a time
FLASH_SINCE = (8, 0)  # compute capability of FlashAttention-2
CAUSAL = 1  # custom_mask_type of the memory-efficient kernel: the diagonal begins at the top left


def forward(heads: Sequence[Tensor], scale: float, window: int | None) -> Sequence[Tensor]:
    """The result of queries, keys and values, and what the backward wants besides.

    None is no window: only for heads of a CUDA device that has no FlashAttention-2 for them.
    """
    if not heads[0].is_cuda:
        assert window is not None
        return _in_blocks(heads, scale, window)
    width, length, wide = heads[0].shape[-1], heads[0].shape[2], [_laid_out(x) for x in heads]
    if has_flash(heads[0]):
        assert window is not None
        out, *others, _ = aten._flash_attention_forward(
            *wide, None, None, length, length, 0.0, True, False, **_flash(scale, window)
        )
    else:
        out, *others, _, _ = aten._efficient_attention_forward(
            *_repeated(wide), *[None] * 5, 0.0, CAUSAL, True, scale=scale, window_size=window
        )
    return _narrowed(out, width), *others


def backward(
    gradient: Tensor,
    heads: Sequence[Tensor],
    results: Sequence[Any],
    scale: float,
    window: int | None,
) -> Sequence[Tensor]:
    """Gradients by queries, keys and values, of forward's results."""
    if not gradient.is_cuda:
        assert window is not None
        return _in_blocks_backward(gradient, heads, results, scale, window)
    width, length, kv_heads = gradient.shape[-1], gradient.shape[2], heads[1].shape[1]
    out, lse, *random = results
    gradient, out, *wide = (_laid_out(x) for x in (gradient, out, *heads))
    if has_flash(heads[0]):
        assert window is not None
        found = aten._flash_attention_backward(
            gradient, *wide, out, lse, None, None, length, length, 0.0, True, *random,
            **_flash(scale, window),
        )  # fmt: skip
    else:
        found = aten._efficient_attention_backward(
            gradient, *_repeated(wide), None, out, None, None, length, length, lse, 0.0, *random,
            CAUSAL, False, scale=scale, window_size=window,
        )  # fmt: skip
        found = found[0], *(_summed(x, kv_heads) for x in found[1:3])
    return [_narrowed(x, width) for x in found]


def has_flash(q: Tensor) -> bool:
    """Whether FlashAttention-2 takes these queries of a CUDA device."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= WIDEST_FLASH
        and torch.cuda.get_device_capability(q.device) >= FLASH_SINCE
    )


def _flash(scale: float, window: int) -> dict[str, Any]:
    return {"scale": scale, "window_size_left": window - 1, "window_size_right": 0}


def _laid_out(x: Tensor) -> Tensor:
    """[b, heads, s, d] as the kernels want it: [b, s, heads, d and columns of zeros]."""
    x, missing = x.transpose(1, 2), -x.shape[-1] % ALIGNED
    return F.pad(x, (0, missing)) if missing else x


def _narrowed(x: Tensor, width: int) -> Tensor:
    """What the kernels give, [b, s, heads, d and more], as [b, heads, s, d]."""
    return (x if x.shape[-1] == width else x[..., :width].contiguous()).transpose(1, 2)


def _repeated(heads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Keys and values for each head of queries, as the memory-efficient kernel wants them."""
    q, *others = heads
    groups = q.shape[2] // others[0].shape[2]
    return q, *(x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in others)


def _summed(x: Tensor, heads: int) -> Tensor:
    """Gradients by repeated heads [b, s, repeated, d] as those by the heads."""
    if x.shape[2] == heads:
        return x
    b, length, repeated, width = x.shape
    return x.view(b, length, heads, repeated // heads, width).sum(3)


# By blocks of queries, on the CPU.


def _bands(length: int, window: int) -> Iterator[tuple[slice, slice, slice]]:
    """Queries of each block, the keys that they see, and these keys' columns of _mask."""
    for first in range(0, length, BLOCK):
        last, seen = min(first + BLOCK, length), max(0, first - window + 1)
        columns = slice(seen - first + window - 1, last - first + window - 1)
        yield slice(first, last), slice(seen, last), columns


def _mask(window: int, like: Tensor) -> Tensor:
    """Added to scores: 0 where query i of a block sees its key, in columns i ... i + w - 1."""
    rows = torch.arange(BLOCK, device=like.device)[:, None]
    columns = torch.arange(BLOCK + window - 1, device=like.device)
    hidden = (columns < rows) | (columns >= rows + window)
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _in_blocks(heads: Sequence[Tensor], scale: float, window: int) -> Sequence[Tensor]:
    q, k, v = heads
    out, mask = _like(q), _mask(window, q)
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, seen, columns in _bands(q.shape[2], window):
        out[:, :, rows], lse[:, :, rows] = aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, rows],
            k[:, :, seen],
            v[:, :, seen],
            attn_mask=mask[: rows.stop - rows.start, columns],
            scale=scale,
        )
    return out, lse


def _in_blocks_backward(
    gradient: Tensor, heads: Sequence[Tensor], results: Sequence[Tensor], scale: float, window: int
) -> Sequence[Tensor]:
    """Bands overlap, so gradients by keys and values are added up, 16-bit ones in fp32."""
    q, k, v = heads
    (out, lse), mask = results, _mask(window, q)
    by_q, by_k, by_v = _like(q), *(_like(x, lse.dtype).zero_() for x in (k, v))
    for rows, seen, columns in _bands(q.shape[2], window):
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient[:, :, rows],
            q[:, :, rows],
            k[:, :, seen],
            v[:, :, seen],
            out[:, :, rows],
            lse[:, :, rows],
            0.0,
            False,
            attn_mask=mask[: rows.stop - rows.start, columns],
            scale=scale,
        )
        by_q[:, :, rows] = found[0]
        by_k[:, :, seen] += found[1]
        by_v[:, :, seen] += found[2]
    return by_q, by_k.to(k.dtype), by_v.to(v.dtype)


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for [b, heads, s, d] in which a token's heads are neighbours."""
    b, heads, length, width = x.shape
    return x.new_empty(b, length, heads, width, dtype=dtype or x.dtype).transpose(1, 2)
