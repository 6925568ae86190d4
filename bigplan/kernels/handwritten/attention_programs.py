"""What the kernels of handwritten/attention.py do, which says how they are called and why."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # scores are exponents of 2
LEAST = tl.constexpr(-1e30)  # a hidden score; -inf minus itself would be no number


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
def result(
    q, k, v, slopes, bounds, out, lse, factor, window, length, heads, groups,
    WINDOWED: tl.constexpr, APART: tl.constexpr, CAP: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Some queries' results, and the logarithms of their sums."""
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
def by_queries(
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
def by_keys(
    q, k, v, slopes, bounds, lse, gradient, deltas, by_k, by_v, factor, scale, window, length,
    heads, GROUPS: tl.constexpr, WINDOWED: tl.constexpr, APART: tl.constexpr, CAP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Gradients by some keys and values, of all heads that read them."""
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
