"""What lies between the products of attention: rows of scores become probabilities, and back.

For heads that no fused kernel holds (runtime/attention/by_products.py). Scores are fp32 products of
queries and keys, [sequences x key heads, queries x groups, keys]: a row has the scores of one query
of one head, and the heads that share keys are beside each other. A program takes a row: it reads
scores once or twice and writes in 16 bits what the next products read. Chains of plain torch move
12 and 24 fp32 scores, these 1.5 and 3 beside what the products move.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.kernels.handwritten.attention_programs import LOG2E

BLOCK = 4096  # scores at a time: of sequences of so many tokens a row is read once
WARPS = 8  # 16 scores a thread; no other number was tried


class Places(NamedTuple):
    """Which queries and keys scores are of."""

    first_query: int
    first_key: int
    groups: int  # heads of queries that share one of keys
    heads: int  # of keys
    window: int  # tokens that a token sees: itself and those just before it
    bounds: Tensor | None = None  # of documents, int32 [b, 2, s]: bigplan/data/documents.py


@triton.jit
def _seen(row, bounds, queries, first_query, first_key, window, length, heads, groups, APART):
    """The first key that a row's query sees and the one after the last, as columns of scores."""
    query = first_query + row % queries // groups
    low = tl.maximum(query - window + 1, 0)
    if APART:
        sequence = row // queries // heads
        low = tl.maximum(low, tl.load(bounds + 2 * sequence * length + query))
    return low - first_key, query + 1 - first_key


@triton.jit
def _probabilities(
    scores, bounds, shares, sums, apart, factor, queries, first_query, first_key, window, length,
    heads, groups, columns, APART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    low, high = _seen(
        row, bounds, queries, first_query, first_key, window, length, heads, groups, APART
    )
    offsets, largest, total = tl.arange(0, BLOCK), -float("inf"), 0.0
    for start in range(low // BLOCK * BLOCK, high, BLOCK):
        at = start + offsets
        seen = (at >= low) & (at < high)
        x = tl.load(scores + row * columns + at, mask=seen, other=-float("inf")) * factor
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp2(largest - larger) + tl.sum(tl.exp2(x - larger), 0)
        largest = larger
    log = largest + tl.log2(total)
    tl.store(sums + row // queries * apart + row % queries, log)
    for start in range(0, columns, BLOCK):
        at = start + offsets
        seen = (at >= low) & (at < high)
        x = tl.load(scores + row * columns + at, mask=seen, other=-float("inf")) * factor
        share = tl.exp2(x - log).to(shares.dtype.element_ty)
        tl.store(shares + row * columns + at, share, mask=at < columns)


@triton.jit
def _by_scores(
    scores, by_shares, bounds, sums, shares, by_scores, apart, factor, scale, queries, first_query,
    first_key, window, length, heads, groups, columns, APART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    low, high = _seen(
        row, bounds, queries, first_query, first_key, window, length, heads, groups, APART
    )
    offsets, delta = tl.arange(0, BLOCK), 0.0
    log = tl.load(sums + row // queries * apart + row % queries)
    for start in range(low // BLOCK * BLOCK, high, BLOCK):
        at = start + offsets
        seen = (at >= low) & (at < high)
        x = tl.load(scores + row * columns + at, mask=seen, other=-float("inf")) * factor
        by_share = tl.load(by_shares + row * columns + at, mask=seen, other=0.0)
        delta += tl.sum(tl.exp2(x - log) * by_share, 0)
    for start in range(0, columns, BLOCK):
        at = start + offsets
        seen = (at >= low) & (at < high)
        x = tl.load(scores + row * columns + at, mask=seen, other=-float("inf")) * factor
        by_share = tl.load(by_shares + row * columns + at, mask=seen, other=0.0)
        share, inside = tl.exp2(x - log), at < columns
        tl.store(shares + row * columns + at, share.to(shares.dtype.element_ty), mask=inside)
        by_score = share * (by_share - delta) * scale
        tl.store(
            by_scores + row * columns + at, by_score.to(by_scores.dtype.element_ty), mask=inside
        )


def probabilities(
    scores: Tensor, sums: Tensor, scale: float, places: Places, dtype: torch.dtype
) -> Tensor:
    """Softmax of scaled scores over the keys that their query sees, 0 for others, in `dtype`.

    Writes each row's logarithm of its sum, to base 2, to `sums`, fp32 of scores' first dimensions.
    """
    shares = torch.empty_like(scores, dtype=dtype)
    _probabilities[(sums.numel(),)](
        scores, _bounds(places, sums), shares, sums, sums.stride(0), scale * LOG2E.value,
        *_numbers(scores, places), APART=places.bounds is not None, BLOCK=_block(scores),
        num_warps=WARPS,
    )  # fmt: skip
    return shares


def gradients(
    by_shares: Tensor,
    scores: Tensor,
    sums: Tensor,
    scale: float,
    places: Places,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The probabilities again, and the gradient by products of queries and keys, in `dtype`."""
    shares, by_scores = (torch.empty_like(scores, dtype=dtype) for _ in range(2))
    _by_scores[(sums.numel(),)](
        scores, by_shares, _bounds(places, sums), sums, shares, by_scores, sums.stride(0),
        scale * LOG2E.value, scale, *_numbers(scores, places), APART=places.bounds is not None,
        BLOCK=_block(scores), num_warps=WARPS,
    )  # fmt: skip
    return shares, by_scores


def _bounds(places: Places, sums: Tensor) -> Tensor:
    return sums if places.bounds is None else places.bounds  # without bounds nobody reads it


def _numbers(scores: Tensor, places: Places) -> tuple[int, ...]:
    """What `_seen` wants to know of all rows, and their columns."""
    length = 0 if places.bounds is None else places.bounds.shape[2]
    return (
        scores.shape[1], places.first_query, places.first_key, places.window, length, places.heads,
        places.groups, scores.shape[2],
    )  # fmt: skip


def _block(scores: Tensor) -> int:
    return min(BLOCK, max(1, 1 << (scores.shape[2] - 1).bit_length()))
