"""Causal attention with biased (ALiBi) or capped (Gemma 2) scores, or within documents.

torch's fused kernels take no bias but a matrix of scores. Heads with eight more columns carry the
biases through them (runtime/alibi.py), but for 136 columns torch takes FlashAttention-2's kernel of
192, and heads are copied: 1.50 and 3.32 ms for 32 heads of 128 and four sequences of 2,048 tokens
on an H100, where these kernels take 0.41 and 1.28 and compiled flex attention 0.46 and 1.25
(benchmarks/results/2026-11-25-h100-alibi). Here a bias is a multiplication and an addition a score.
A capped score is cap * tanh(score / cap), whose derivative is 1 - tanh^2.

The forward is FlashAttention-2's (Dao 2023, arXiv 2307.08691, algorithm 1). Its backward adds
gradients by queries with atomics. Here they have a kernel of their own, which computes scores and
probabilities once more. So the same inputs give the same bits.

Tensors are contiguous [b, s, heads, d]; keys and values may have fewer heads. Scores are fp32, in
powers of two, and no tensor of s x s is in memory. With a window of w, a token sees itself and the
w - 1 tokens before it. With bounds (bigplan/data/documents.py) it sees tokens of its own document
alone: tiles of scores without such pairs are skipped, those with some others are masked. Bounds are
a tensor of one shape, whatever the number of documents, so that CUDA graphs repeat the kernels.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)  # scores are exponents of 2
LEAST = tl.constexpr(-1e30)  # a hidden score; -inf minus itself would be no number


class ScoreRule(NamedTuple):
    """What becomes of products of queries and keys."""

    scale: float  # their factor
    cap: float | None = None  # of scaled ones, before a bias
    window: int | None = None  # tokens that a token sees

    @property
    def factor(self) -> float:
        """Of products: the kernels' scores are exponents of 2, or what tanh takes."""
        return float(self.scale * LOG2E.value if self.cap is None else self.scale / self.cap)

    @property
    def height(self) -> float:
        """The cap of the kernels' scores; 0: none."""
        return float((self.cap or 0.0) * LOG2E.value)


class Tile(NamedTuple):
    """Queries and keys whose scores a program has at a time, and how it is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Those of the result, of gradients by queries, and of gradients by keys and values."""

    result: Tile
    by_queries: Tile
    by_keys: Tile


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: ScoreRule,
    slopes: Tensor | None = None,
    bounds: Tensor | None = None,
) -> Tensor:
    """The same in plain torch, in the dtype of q: a score for each pair of tokens in memory."""
    length, heads = q.shape[1:3]
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    k, v = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (k, v))
    place = torch.arange(length, device=q.device)
    distance = place[None, :] - place[:, None]
    scores = q @ k.mT * rule.scale
    if rule.cap is not None:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    if slopes is not None:
        scores = scores + slopes.to(q)[:, None, None] * distance
    hidden = (distance > 0) | (distance <= -(rule.window or length))
    if bounds is not None:
        hidden = hidden | (place < bounds[:, 0, :, None])[:, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2)


@triton.jit
def _tanh(x):
    """Of any size: the exponential of a large x is infinite, and its reciprocal 0."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def _rows(tensor, first, stride, length, ROWS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Tokens `first` and after of one head, [ROWS, D]; zeros beyond the sequence and the width."""
    row, column = tl.arange(0, ROWS), tl.arange(0, D)
    inside = (first + row < length)[:, None]
    if WIDTH < D:
        inside = inside & (column < WIDTH)[None, :]
    at = tensor + tl.cast(first, tl.int64) * stride + row[:, None] * stride + column[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _put(
    tensor, value, first, stride, length, ROWS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr
):
    """Store what _rows loads."""
    row, column = tl.arange(0, ROWS), tl.arange(0, D)
    inside = (first + row < length)[:, None]
    if WIDTH < D:
        inside = inside & (column < WIDTH)[None, :]
    at = tensor + tl.cast(first, tl.int64) * stride + row[:, None] * stride + column[None, :]
    tl.store(at, value.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def _hides(i, j, begin, window, WINDOWED: tl.constexpr, APART: tl.constexpr):
    """Where query i, whose document begins at `begin`, does not see key j."""
    hidden = j > i
    if WINDOWED:
        hidden = hidden | (j + window <= i)
    if APART:
        hidden = hidden | (j < begin)
    return hidden


@triton.jit
def _begins(bounds, i, length, APART: tl.constexpr):
    """Where the documents of queries i begin; without documents, whatever is not read."""
    if APART:
        return tl.load(bounds + i, mask=i < length, other=0)
    return i


@triton.jit
def _seen(
    first, bounds, window, length, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Keys of a tile of queries: from `start`; `whole` ... `edge` are seen by all; up to `end`."""
    end = tl.minimum(first + QUERIES, length)
    edge = (first + 1) // KEYS * KEYS
    start, whole = 0, 0
    if WINDOWED:
        start = tl.maximum(first - window + 1, 0) // KEYS * KEYS
        whole = tl.minimum(tl.cdiv(tl.maximum(first + QUERIES - window, 0), KEYS) * KEYS, edge)
    if APART:
        # Documents begin the later, the later the query is.
        start = tl.maximum(start, tl.load(bounds + first) // KEYS * KEYS)
        latest = tl.cdiv(tl.load(bounds + end - 1), KEYS) * KEYS
        whole = tl.minimum(tl.maximum(whole, latest), edge)
    return start, whole, edge, end


@triton.jit
def _seeing(
    first, bounds, window, length, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Queries of a tile of keys, likewise."""
    start = first // QUERIES * QUERIES
    end, edge = length, length
    if WINDOWED:
        end = tl.minimum(first + KEYS + window - 1, length)
        edge = tl.minimum((first + window) // QUERIES * QUERIES, end)
    if APART:
        last = tl.minimum(first + KEYS, length) - 1
        end = tl.minimum(end, tl.load(bounds + length + last))
        edge = tl.minimum(edge, tl.load(bounds + length + first) // QUERIES * QUERIES)
    whole = tl.minimum(tl.cdiv(first + KEYS - 1, QUERIES) * QUERIES, end)
    return start, whole, tl.maximum(edge, whole), end


@triton.jit
def _scores(product, factor, CAP: tl.constexpr):
    """Of products of queries and keys."""
    score = product * factor
    if CAP > 0:
        score = CAP * _tanh(score)
    return score


@triton.jit
def _by_products(by_score, score, CAP: tl.constexpr):
    """Gradients by products times their factor, of those by scores."""
    if CAP > 0:
        by_score = by_score * (1.0 - (score / CAP) * (score / CAP))
    return by_score


@triton.jit
def _add_values(
    total, highest, weight, query, k, v, begin, first, start, end, factor, slope, window, stride,
    length, MASKED: tl.constexpr, WINDOWED: tl.constexpr, APART: tl.constexpr, CAP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Values of keys start ... end by their probabilities, as online softmax adds them."""
    i = first + tl.arange(0, QUERIES)
    for at in tl.range(start, end, KEYS):
        j = at + tl.arange(0, KEYS)
        key = _rows(k, at, stride, length, KEYS, WIDTH, D)
        score = _scores(tl.dot(query, tl.trans(key)), factor, CAP) + (slope * (j - first))[None, :]
        if MASKED:
            hidden = _hides(i[:, None], j[None, :], begin[:, None], window, WINDOWED, APART)
            score = tl.where(hidden, LEAST, score)
        new = tl.maximum(highest, tl.max(score, 1))
        share = tl.exp2(score - new[:, None])
        before = tl.exp2(highest - new)
        weight = weight * before + tl.sum(share, 1)
        value = _rows(v, at, stride, length, KEYS, WIDTH, D)
        total = tl.dot(share.to(value.dtype), value, total * before[:, None])
        highest = new
    return total, highest, weight


@triton.jit
def _result(
    q, k, v, slopes, bounds, out, lse, factor, window, length, heads, groups,
    WINDOWED: tl.constexpr, APART: tl.constexpr, CAP: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    # The last queries see most keys. They go first, so that no long program begins late.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    wide, narrow = heads * WIDTH, heads // groups * WIDTH
    own = batch * length * wide + head * WIDTH
    others = batch * length * narrow + head // groups * WIDTH
    slope = tl.load(slopes + head) * LOG2E
    query = _rows(q + own, first, wide, length, QUERIES, WIDTH, D)
    total = tl.zeros((QUERIES, D), tl.float32)
    highest = tl.full((QUERIES,), LEAST, tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    bounds += batch * 2 * length
    begin = _begins(bounds, first + tl.arange(0, QUERIES), length, APART)
    start, whole, edge, end = _seen(
        first, bounds, window, length, QUERIES, KEYS, WINDOWED, APART
    )  # fmt: skip
    if WINDOWED or APART:
        total, highest, weight = _add_values(
            total, highest, weight, query, k + others, v + others, begin, first, start, whole,
            factor, slope, window, narrow, length, True, WINDOWED, APART, CAP, QUERIES, KEYS, WIDTH,
            D,
        )  # fmt: skip
    total, highest, weight = _add_values(
        total, highest, weight, query, k + others, v + others, begin, first, whole, edge, factor,
        slope, window, narrow, length, False, WINDOWED, APART, CAP, QUERIES, KEYS, WIDTH, D,
    )  # fmt: skip
    total, highest, weight = _add_values(
        total, highest, weight, query, k + others, v + others, begin, first, edge, end, factor,
        slope, window, narrow, length, True, WINDOWED, APART, CAP, QUERIES, KEYS, WIDTH, D,
    )  # fmt: skip
    _put(out + own, total / weight[:, None], first, wide, length, QUERIES, WIDTH, D)
    i = first + tl.arange(0, QUERIES)
    # Biases counted from the tile's first query; in memory they count from each query.
    sums = highest + tl.log2(weight) - slope * tl.arange(0, QUERIES)
    tl.store(lse + (batch * heads + head) * length + i, sums, mask=i < length)


@triton.jit
def _add_keys(
    total, query, gradient, sums, delta, k, v, begin, first, start, end, factor, slope, window,
    stride, length, MASKED: tl.constexpr, WINDOWED: tl.constexpr, APART: tl.constexpr,
    CAP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Keys start ... end by the gradients of their scores."""
    i = first + tl.arange(0, QUERIES)
    for at in tl.range(start, end, KEYS):
        j = at + tl.arange(0, KEYS)
        key = _rows(k, at, stride, length, KEYS, WIDTH, D)
        value = _rows(v, at, stride, length, KEYS, WIDTH, D)
        score = _scores(tl.dot(query, tl.trans(key)), factor, CAP)
        share = tl.exp2(score + (slope * (j - first))[None, :] - sums[:, None])
        if MASKED:
            hidden = _hides(i[:, None], j[None, :], begin[:, None], window, WINDOWED, APART)
            share = tl.where(hidden, 0.0, share)
        by_share = tl.dot(gradient, tl.trans(value))
        by_score = _by_products(share * (by_share - delta[:, None]), score, CAP)
        total = tl.dot(by_score.to(key.dtype), key, total)
    return total


@triton.jit
def _by_queries(
    q, k, v, slopes, bounds, out, lse, gradient, deltas, by_q, factor, scale, window, length, heads,
    groups, WINDOWED: tl.constexpr, APART: tl.constexpr, CAP: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Gradients by queries, and `deltas`: of each query the result times its gradient, fp32."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    wide, narrow = heads * WIDTH, heads // groups * WIDTH
    own = batch * length * wide + head * WIDTH
    others = batch * length * narrow + head // groups * WIDTH
    slope = tl.load(slopes + head) * LOG2E
    i = first + tl.arange(0, QUERIES)
    row = (batch * heads + head) * length + i
    query = _rows(q + own, first, wide, length, QUERIES, WIDTH, D)
    by_out = _rows(gradient + own, first, wide, length, QUERIES, WIDTH, D)
    found = _rows(out + own, first, wide, length, QUERIES, WIDTH, D)
    delta = tl.sum(found.to(tl.float32) * by_out.to(tl.float32), 1)
    tl.store(deltas + row, delta, mask=i < length)
    sums = tl.load(lse + row, mask=i < length, other=0.0) + slope * tl.arange(0, QUERIES)
    total = tl.zeros((QUERIES, D), tl.float32)
    bounds += batch * 2 * length
    begin = _begins(bounds, i, length, APART)
    start, whole, edge, end = _seen(
        first, bounds, window, length, QUERIES, KEYS, WINDOWED, APART
    )  # fmt: skip
    if WINDOWED or APART:
        total = _add_keys(
            total, query, by_out, sums, delta, k + others, v + others, begin, first, start, whole,
            factor, slope, window, narrow, length, True, WINDOWED, APART, CAP, QUERIES, KEYS, WIDTH,
            D,
        )  # fmt: skip
    total = _add_keys(
        total, query, by_out, sums, delta, k + others, v + others, begin, first, whole, edge,
        factor, slope, window, narrow, length, False, WINDOWED, APART, CAP, QUERIES, KEYS, WIDTH, D,
    )  # fmt: skip
    total = _add_keys(
        total, query, by_out, sums, delta, k + others, v + others, begin, first, edge, end, factor,
        slope, window, narrow, length, True, WINDOWED, APART, CAP, QUERIES, KEYS, WIDTH, D,
    )  # fmt: skip
    _put(by_q + own, total * scale, first, wide, length, QUERIES, WIDTH, D)


@triton.jit
def _add_queries(
    by_key, by_value, key, value, q, gradient, lse, deltas, bounds, first, start, end, factor,
    slope, window, stride, length, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    APART: tl.constexpr, CAP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """What queries start ... end add to the gradients. Scores are [keys, queries]."""
    j = first + tl.arange(0, KEYS)
    bias = slope * tl.arange(0, KEYS)
    for at in tl.range(start, end, QUERIES):
        i = at + tl.arange(0, QUERIES)
        query = _rows(q, at, stride, length, QUERIES, WIDTH, D)
        sums = tl.load(lse + i, mask=i < length, other=0.0) + slope * (i - first)
        score = _scores(tl.dot(key, tl.trans(query)), factor, CAP)
        share = tl.exp2(score + bias[:, None] - sums[None, :])
        if MASKED:
            begin = _begins(bounds, i, length, APART)
            hidden = _hides(i[None, :], j[:, None], begin[None, :], window, WINDOWED, APART)
            share = tl.where(hidden, 0.0, share)
        by_out = _rows(gradient, at, stride, length, QUERIES, WIDTH, D)
        by_value = tl.dot(share.to(query.dtype), by_out, by_value)
        delta = tl.load(deltas + i, mask=i < length, other=0.0)
        by_share = tl.dot(value, tl.trans(by_out))
        by_score = _by_products(share * (by_share - delta[None, :]), score, CAP)
        by_key = tl.dot(by_score.to(query.dtype), query, by_key)
    return by_key, by_value


@triton.jit
def _by_keys(
    q, k, v, slopes, bounds, lse, gradient, deltas, by_k, by_v, factor, scale, window, length,
    heads, GROUPS: tl.constexpr, WINDOWED: tl.constexpr, APART: tl.constexpr, CAP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * KEYS
    key_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    wide, narrow = heads * WIDTH, heads // GROUPS * WIDTH
    others = batch * length * narrow + key_head * WIDTH
    key = _rows(k + others, first, narrow, length, KEYS, WIDTH, D)
    value = _rows(v + others, first, narrow, length, KEYS, WIDTH, D)
    by_key = tl.zeros((KEYS, D), tl.float32)
    by_value = tl.zeros((KEYS, D), tl.float32)
    bounds += batch * 2 * length
    start, whole, edge, end = _seeing(
        first, bounds, window, length, QUERIES, KEYS, WINDOWED, APART
    )  # fmt: skip
    for group in range(GROUPS):
        head = key_head * GROUPS + group
        own, row = batch * length * wide + head * WIDTH, (batch * heads + head) * length
        slope = tl.load(slopes + head) * LOG2E
        by_key, by_value = _add_queries(
            by_key, by_value, key, value, q + own, gradient + own, lse + row, deltas + row, bounds,
            first, start, whole, factor, slope, window, wide, length, True, WINDOWED, APART, CAP,
            QUERIES, KEYS, WIDTH, D,
        )  # fmt: skip
        by_key, by_value = _add_queries(
            by_key, by_value, key, value, q + own, gradient + own, lse + row, deltas + row, bounds,
            first, whole, edge, factor, slope, window, wide, length, False, WINDOWED, APART, CAP,
            QUERIES, KEYS, WIDTH, D,
        )  # fmt: skip
        if WINDOWED or APART:
            by_key, by_value = _add_queries(
                by_key, by_value, key, value, q + own, gradient + own, lse + row, deltas + row,
                bounds, first, edge, end, factor, slope, window, wide, length, True, WINDOWED,
                APART, CAP, QUERIES, KEYS, WIDTH, D,
            )  # fmt: skip
    _put(by_k + others, by_key * scale, first, narrow, length, KEYS, WIDTH, D)
    _put(by_v + others, by_value, first, narrow, length, KEYS, WIDTH, D)


# The fastest of 10 to 12 tiles for each kernel on an H100, 32 heads of 128 and 64 heads of 64, four
# sequences of 2,048 tokens (benchmarks/results/2026-11-25-h100-alibi). Those of 256 columns are the
# fastest of 24 and 54 on an H200, 8 heads capped at 50 and sequences of 4,096 tokens
# (2026-11-27-h200-gemma/tiles.txt).
HOPPER = {
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 1), Tile(128, 32, 8, 2)),
    128: Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 128, 4, 3)),
}
LARGE = 200 << 10  # bytes of shared memory that these tiles want: Hopper's 228 KiB, or Blackwell's
# What compiles for less without spilled registers, and what fits the 64 KiB of Turing. Neither has
# been measured.
SMALL, LEAST_SHARED = Tiles(*[Tile(64, 32, 4, 2)] * 3), 96 << 10
SMALLEST = Tiles(*[Tile(32, 32, 4, 1)] * 3)
SMALLEST_WIDE = Tiles(*[Tile(16, 16, 4, 1)] * 3)  # of 256 columns, whose rows are twice as long


def tiles_for(columns: int, shared: int) -> Tiles:
    """Tiles for heads of `columns`, on a GPU of so many bytes of shared memory."""
    if shared >= LARGE:
        return HOPPER[max(64, columns)]
    if columns > 128:
        return SMALLEST if shared >= LEAST_SHARED else SMALLEST_WIDE
    return SMALL if shared >= LEAST_SHARED else SMALLEST


@cache
def _tiles_on(device: torch.device, columns: int) -> Tiles:
    if device.type != "cuda":
        return tiles_for(columns, LARGE)
    return tiles_for(
        columns, torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    )


def _columns(width: int) -> int:
    """Of a tile: products have a power of two, 16 at least."""
    return max(16, 1 << (width - 1).bit_length())


def forward(
    inputs: tuple[Tensor, Tensor, Tensor],
    rule: ScoreRule,
    slopes: Tensor | None = None,
    tiles: Tiles | None = None,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The result, as q, and each query's logarithm of its sum, to base 2, fp32 [b, heads, s].

    `inputs`: q, k, v. `slopes`: fp32 [heads], by which a key's score falls with each token between
    it and the query; None: by nothing. `bounds`: int32 [b, 2, s], of each token where its document
    begins and ends; None: a sequence is one.
    """
    q, k, v = inputs
    batch, length, heads, width = q.shape
    groups, columns = heads // k.shape[2], _columns(width)
    tile, _, _ = tiles or _tiles_on(q.device, columns)
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    _result[triton.cdiv(length, tile.queries), heads, batch](
        q, k, v, _slopes(slopes, q), lse if bounds is None else bounds, out, lse, rule.factor,
        rule.window or length, length, heads, groups, WINDOWED=rule.window is not None,
        APART=bounds is not None, CAP=rule.height, QUERIES=tile.queries, KEYS=tile.keys,
        WIDTH=width, D=columns, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def _slopes(slopes: Tensor | None, q: Tensor) -> Tensor:
    return q.new_zeros(q.shape[2], dtype=torch.float32) if slopes is None else slopes


def backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    rule: ScoreRule,
    slopes: Tensor | None = None,
    tiles: Tiles | None = None,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by q, k and v, the `inputs`, of forward's `results`."""
    (q, k, v), (out, lse) = inputs, results
    batch, length, heads, width = q.shape
    groups, columns = heads // k.shape[2], _columns(width)
    _, tile, other = tiles or _tiles_on(q.device, columns)
    by_q, by_k, by_v = (torch.empty_like(each) for each in inputs)
    deltas, slopes = torch.empty_like(lse), _slopes(slopes, q)
    documents = lse if bounds is None else bounds  # without bounds nobody reads it
    _by_queries[triton.cdiv(length, tile.queries), heads, batch](
        q, k, v, slopes, documents, out, lse, gradient, deltas, by_q, rule.factor, rule.scale,
        rule.window or length, length, heads, groups, WINDOWED=rule.window is not None,
        APART=bounds is not None, CAP=rule.height, QUERIES=tile.queries, KEYS=tile.keys,
        WIDTH=width, D=columns, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _by_keys[triton.cdiv(length, other.keys), k.shape[2], batch](
        q, k, v, slopes, documents, lse, gradient, deltas, by_k, by_v, rule.factor, rule.scale,
        rule.window or length, length, heads, GROUPS=groups, WINDOWED=rule.window is not None,
        APART=bounds is not None, CAP=rule.height, QUERIES=other.queries, KEYS=other.keys,
        WIDTH=width, D=columns, num_warps=other.warps, num_stages=other.stages,
    )  # fmt: skip
    return by_q, by_k, by_v
