"""Causal attention by matrix products, some queries at a time, for heads that no flash kernel has.

Those of more than 256 columns, as Gemma 4's global blocks have (512). torch's memory-efficient
kernel takes them too: 4.4 and 37 ms forward and backward for 4,096 tokens of 32 heads on an H200,
where this takes 2.3 and 4.6 (benchmarks/results/2026-11-28-h200-wide-heads). Scores of some queries
and the keys that they may see are in memory, in fp32. Between the products kernels make
probabilities of them, and gradients by them (bigplan/kernels/handwritten/score_rows.py). The
backward computes scores again. Queries that share keys are rows of one product, so keys are not
repeated and their gradients need no sum. Saved are queries, keys, values, the result and the sums
of softmax, as with torch's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.mechanics import wide_queries
from bigplan.runtime.attention.in_blocks import Heads, Scores

if TYPE_CHECKING:
    from bigplan.kernels.handwritten.score_rows import Places


def attention(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Causal attention of q [b, s, heads, d], k and v [b, s, kv heads, d]: [b, s, heads, d].

    `scores` have neither cap nor slopes.
    """
    return _ByProducts.apply(q, k, v, scores)  # type: ignore[no-any-return, no-untyped-call]


class _ByProducts(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        output, sums = forward((q, k, v), scores)
        ctx.save_for_backward(q, k, v, output, sums)
        ctx.scores = scores
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        # The result is saved as with other kernels, which plans count; nothing here reads it.
        q, k, v, _, sums = ctx.saved_tensors  # each may be asked for once
        return *backward(gradients[0], (q, k, v), sums, ctx.scores), None


def forward(inputs: Heads, scores: Scores) -> tuple[Tensor, Tensor]:
    """The result [b, s, heads, d]; logarithms of sums to base 2, fp32 [b kv heads, s groups]."""
    from bigplan.kernels.handwritten import score_rows

    q, k, v = inputs
    queries, keys, values = _as_rows(q, k.shape[2]), _as_rows(k), _as_rows(v)
    output = torch.empty_like(queries)
    sums = queries.new_empty(queries.shape[:2], dtype=torch.float32)
    for rows, seen, places in _blocks(q, k, scores):
        products = _product(queries[:, rows], keys[:, seen].mT)
        shares = score_rows.probabilities(products, sums[:, rows], scores.scale, places, q.dtype)
        torch.bmm(shares, values[:, seen], out=output[:, rows])
    return _as_heads(output, q).contiguous(), sums


def backward(gradient: Tensor, inputs: Heads, sums: Tensor, scores: Scores) -> Heads:
    """Gradients by queries, keys and values, of forward's result and sums."""
    from bigplan.kernels.handwritten import score_rows

    q, k, v = inputs
    queries, by_output = (_as_rows(x, k.shape[2]) for x in (q, gradient))
    keys, values, by_queries = _as_rows(k), _as_rows(v), torch.empty_like(queries)
    by_keys, by_values = (torch.zeros(x.shape, device=x.device) for x in (keys, values))
    for rows, seen, places in _blocks(q, k, scores):
        products = _product(queries[:, rows], keys[:, seen].mT)
        by_shares = _product(by_output[:, rows], values[:, seen].mT)
        shares, by_products = score_rows.gradients(
            by_shares, products, sums[:, rows], scores.scale, places, q.dtype
        )
        del products, by_shares
        _add_product(by_values[:, seen], shares.mT, by_output[:, rows])
        _add_product(by_keys[:, seen], by_products.mT, queries[:, rows])
        torch.bmm(by_products, keys[:, seen], out=by_queries[:, rows])
        del shares, by_products  # before the next block has its own
    found = zip((by_queries, by_keys, by_values), inputs, strict=True)
    by_q, by_k, by_v = (_as_heads(x, like).to(like.dtype).contiguous() for x, like in found)
    return by_q, by_k, by_v


def _blocks(q: Tensor, k: Tensor, scores: Scores) -> Iterator[tuple[slice, slice, Places]]:
    """Rows of some queries, the keys that any of them may see, and both in the kernels' words."""
    from bigplan.kernels.handwritten.score_rows import Places

    length, heads = k.shape[1:3]
    window, groups = min(scores.window or length, length), q.shape[2] // heads
    together = wide_queries(len(q) * q.shape[2] * length)
    for first in range(0, length, together):
        last, start = min(first + together, length), max(0, first + 1 - window)
        places = Places(first, start, groups, heads, window, scores.bounds)
        yield slice(first * groups, last * groups), slice(start, last), places


def _as_rows(x: Tensor, matrices: int | None = None) -> Tensor:
    """Heads [b, s, heads, d] as `matrices` a sequence: rows of heads that share one by token.

    [b matrices, s heads / matrices, d]; None: each head is one.
    """
    b, length, heads, width = x.shape
    apart = x.reshape(b, length, matrices or heads, -1, width).transpose(1, 2)
    return apart.reshape(b * apart.shape[1], -1, width).contiguous()


def _as_heads(x: Tensor, like: Tensor) -> Tensor:
    """Such rows as heads again, [b, s, heads, d] as `like`."""
    b, length, _, width = like.shape
    return x.view(b, -1, length, x.shape[1] // length, width).transpose(1, 2).reshape(like.shape)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """fp32 products of matrices in 16 bits."""
    if x.is_cuda and x.element_size() == 2:
        return torch.bmm(x, y, out_dtype=torch.float32)
    return torch.bmm(x.float(), y.float())


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Add x y to fp32 sums."""
    if x.is_cuda and x.element_size() == 2:
        torch.baddbmm(total, x, y, out_dtype=torch.float32, out=total)
    else:
        total += torch.bmm(x.float(), y.float())
