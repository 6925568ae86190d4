"""The backward of bigplan/kernels/handwritten/delta_rule.py, with delta_rule_programs.py's names.

`by_x` is the gradient by x. Those by queries and keys are of each value head; its key head adds
them up. Sums within a head are in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bigplan.kernels.handwritten.delta_rule_programs import (
    put,
    reaches,
    scores_of,
    softplus,
    tile,
    within,
)


@triton.jit(do_not_specialize=("length", "heads"))
def unread(
    q, k, own, states, reach, by_read, by_own, by_q, by_k, by_reach, length, heads,
    EACH: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of O, by a chunk's V', Q and K; not yet by what they leave in the state."""
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, start = chunk * C, batch.to(tl.int64) * length
    key_columns, columns = heads // EACH * KEYS, heads * VALUES
    here, there = start * key_columns + head // EACH * KEYS, start * columns + head * VALUES
    at = start * heads + head * length
    c = reaches(reach + at, first, length, C)
    scores = scores_of(q + here, k + here, c, first, length, key_columns, KEYS, PARTS, BLOCK, C)
    by_scores = tl.zeros((C, C), tl.float32)
    for column in range(0, VALUES, BLOCK):
        given = tile(by_read + there + column, first, length, columns, BLOCK, C, BLOCK)
        by_new = tl.dot(tl.trans(scores), given)
        put(by_own + there + column, by_new, first, length, columns, BLOCK, C, BLOCK)
        new = tile(own + there + column, first, length, columns, BLOCK, C, BLOCK)
        by_scores = tl.dot(given, tl.trans(new), by_scores)
    narrow = (by_scores * within(c, C, False)).to(scores.dtype)
    place = (batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
    states += place * KEYS * VALUES
    old_columns = heads * KEYS
    to, grown = start * old_columns + head * KEYS, tl.zeros((C,), tl.float32)
    for part in range(PARTS):
        row, used = part * BLOCK, KEYS - part * BLOCK
        by_query = tl.zeros((C, BLOCK), tl.float32)
        for column in range(0, VALUES, BLOCK):
            given = tile(by_read + there + column, first, length, columns, BLOCK, C, BLOCK)
            state = tile(states + column, row, KEYS, VALUES, BLOCK, BLOCK, BLOCK)
            by_query = tl.dot(given, tl.trans(state), by_query)
        key = tile(k + here + row, first, length, key_columns, used, C, BLOCK)
        by_query = tl.dot(narrow, key, by_query * tl.exp(c)[:, None])
        put(by_q + to + row, by_query, first, length, old_columns, used, C, BLOCK)
        # What a query gives grows with exp(c) of its token, a key's scores with exp(-c).
        query = tile(q + here + row, first, length, key_columns, used, C, BLOCK)
        grown += tl.sum(by_query * query.to(tl.float32), 1)
        by_key = tl.dot(tl.trans(narrow), query)
        put(by_k + to + row, by_key, first, length, old_columns, used, C, BLOCK)
        grown -= tl.sum(by_key * key.to(tl.float32), 1)
    token = first + tl.arange(0, C)
    tl.store(by_reach + at + token, grown, mask=token < length)


@triton.jit(do_not_specialize=("length", "heads"))
def walked_back(
    q, k, old, reach, by_read, by_own, by_states, length, heads, EACH: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Gradients by some columns of the states after each chunk, from the last chunk on.

    `by_own` gets what V' leaves in the state added, in place.
    """
    part, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, chunks = batch.to(tl.int64) * length, tl.cdiv(length, C)
    key_columns, old_columns, columns = heads // EACH * KEYS, heads * KEYS, heads * VALUES
    q += start * key_columns + head // EACH * KEYS
    k += start * key_columns + head // EACH * KEYS
    old += start * old_columns + head * KEYS
    by_read += start * columns + head * VALUES + part * BLOCK
    by_own += start * columns + head * VALUES + part * BLOCK
    reach += start * heads + head * length
    by_states += (batch * heads + head + 1).to(tl.int64) * chunks * KEYS * VALUES + part * BLOCK
    by_state = tl.zeros((K, BLOCK), tl.float32)
    for number in range(chunks):
        first = (chunks - 1 - number) * C
        by_states -= KEYS * VALUES
        narrow = by_state.to(k.dtype.element_ty)
        put(by_states, narrow, 0, KEYS, VALUES, BLOCK, K, BLOCK)
        c = reaches(reach, first, length, C)
        last = tl.load(reach + tl.minimum(first + C, length) - 1)
        key = tile(k, first, length, key_columns, KEYS, C, K)
        by_new = tl.dot(key, narrow) * tl.exp(last - c)[:, None]
        by_new += tile(by_own, first, length, columns, BLOCK, C, BLOCK).to(tl.float32)
        put(by_own, by_new, first, length, columns, BLOCK, C, BLOCK)
        given = tile(by_read, first, length, columns, BLOCK, C, BLOCK).to(tl.float32)
        given = (given * tl.exp(c)[:, None]).to(narrow.dtype)
        query = tile(q, first, length, key_columns, KEYS, C, K)
        known = tile(old, first, length, old_columns, KEYS, C, K)
        by_state = by_state * tl.exp(last) + tl.dot(tl.trans(query), given)
        by_state -= tl.dot(tl.trans(known), by_new.to(narrow.dtype))


@triton.jit(do_not_specialize=("length", "heads"))
def unsolved(
    k, v, own, inverse, rate, reach, states, by_states, by_own, by_k, by_reach, by_v, by_rate,
    by_inverse, length, heads, EACH: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of U and W, and of the state that a chunk leaves, by K, V, b, reach and the inverse.

    Adds to `by_k` and to `by_reach`, whose last token of a chunk gets what all its tokens share.
    """
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, start = chunk * C, batch.to(tl.int64) * length
    token = first + tl.arange(0, C)
    inside, at = token < length, start * heads + head * length
    c = reaches(reach + at, first, length, C)
    b = tl.load(rate + at + token, mask=inside, other=0.0)
    by_c = tl.load(by_reach + at + token, mask=inside, other=0.0)
    last = tl.load(reach + at + tl.minimum(first + C, length) - 1)
    solution = inverse + start * heads * C + head * C
    solution = tl.trans(tile(solution, first, length, heads * C, C, C, C))
    place = (batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
    states += place * KEYS * VALUES
    by_states += place * KEYS * VALUES
    key_columns, old_columns, columns = heads // EACH * KEYS, heads * KEYS, heads * VALUES
    k += start * key_columns + head // EACH * KEYS
    by_k += start * old_columns + head * KEYS
    there = start * columns + head * VALUES

    # By the system's right side and its inverse: U, whose gradient is that by V'.
    by_solution, by_b = tl.zeros((C, C), tl.float32), tl.zeros((C,), tl.float32)
    for column in range(0, VALUES, BLOCK):
        by_new = tile(by_own + there + column, first, length, columns, BLOCK, C, BLOCK)
        value = tile(v + there + column, first, length, columns, BLOCK, C, BLOCK)
        scaled = (value.to(tl.float32) * b[:, None]).to(by_new.dtype)
        by_solution = tl.dot(by_new, tl.trans(scaled), by_solution)
        by_scaled = tl.dot(solution, by_new)
        by_b += tl.sum(by_scaled * value.to(tl.float32), 1)
        by_scaled *= b[:, None]
        put(by_v + there + column, by_scaled, first, length, columns, BLOCK, C, BLOCK)

    # W, whose gradient is -V' S^T's; and by what V' leaves in the state.
    faded, by_last, both = b * tl.exp(c), 0.0, 0.0
    for part in range(PARTS):
        row, used = part * BLOCK, KEYS - part * BLOCK
        by_old, by_key = tl.zeros((C, BLOCK), tl.float32), tl.zeros((C, BLOCK), tl.float32)
        for column in range(0, VALUES, BLOCK):
            by_new = tile(by_own + there + column, first, length, columns, BLOCK, C, BLOCK)
            state = tile(states + column, row, KEYS, VALUES, BLOCK, BLOCK, BLOCK)
            by_old = tl.dot(by_new, tl.trans(state), by_old)
            new = tile(own + there + column, first, length, columns, BLOCK, C, BLOCK)
            by_state = tile(by_states + column, row, KEYS, VALUES, BLOCK, BLOCK, BLOCK)
            by_key = tl.dot(new, tl.trans(by_state), by_key)
            both += tl.sum(tl.sum(state.to(tl.float32) * by_state.to(tl.float32), 1), 0)
        key = tile(k + row, first, length, key_columns, used, C, BLOCK).to(tl.float32)
        by_key *= tl.exp(last - c)[:, None]
        left = tl.sum(by_key * key, 1)
        by_last += tl.sum(left, 0)
        by_c -= left
        narrow = (-by_old).to(solution.dtype)
        scaled = (key * faded[:, None]).to(solution.dtype)
        by_solution = tl.dot(narrow, tl.trans(scaled), by_solution)
        by_faded = tl.dot(solution, narrow)
        along = tl.sum(by_faded * key, 1)
        by_b += along * tl.exp(c)
        by_c += along * faded
        by_key += by_faded * faded[:, None]
        by_key += tile(by_k + row, first, length, old_columns, used, C, BLOCK).to(tl.float32)
        put(by_k + row, by_key, first, length, old_columns, used, C, BLOCK)
    by_last += tl.exp(last) * both
    by_c += tl.where(token == tl.minimum(first + C, length) - 1, by_last, 0.0)
    tl.store(by_reach + at + token, by_c, mask=inside)
    tl.store(by_rate + at + token, by_b, mask=inside)
    to = by_inverse + start * heads * C + head * C
    put(to, by_solution, first, length, heads * C, C, C, C)


@triton.jit(do_not_specialize=("length", "heads"))
def uninverted(
    k, rates, decays, log_decay, offset, inverse, rate, reach, by_inverse, by_rate, by_reach, by_k,
    by_rates, by_decays, by_scalars, most, length, heads, EACH: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of the inverse by K, b and g, and by what b and g are made of; adds to `by_k`.

    `by_scalars`: of each chunk and head, by log_decay and by offset.
    """
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, start = chunk * C, batch.to(tl.int64) * length
    token = first + tl.arange(0, C)
    inside, at = token < length, start * heads + head * length
    c = reaches(reach + at, first, length, C)
    b = tl.load(rate + at + token, mask=inside, other=0.0)
    key_columns, old_columns = heads // EACH * KEYS, heads * KEYS
    k += start * key_columns + head // EACH * KEYS
    by_k += start * old_columns + head * KEYS
    here = start * heads * C + head * C
    solution = tl.trans(tile(inverse + here, first, length, heads * C, C, C, C))
    given = tile(by_inverse + here, first, length, heads * C, C, C, C)
    by_system = tl.dot(solution, tl.dot(given, solution).to(solution.dtype))
    by_system = -by_system * within(c, C, True)
    product = tl.zeros((C, C), tl.float32)
    for part in range(PARTS):
        row, used = part * BLOCK, KEYS - part * BLOCK
        key = tile(k + row, first, length, key_columns, used, C, BLOCK)
        product = tl.dot(key, tl.trans(key), product)
    product *= by_system
    by_b = tl.load(by_rate + at + token, mask=inside, other=0.0) + tl.sum(product, 1)
    product *= b[:, None]
    by_c = tl.load(by_reach + at + token, mask=inside, other=0.0)
    by_c += tl.sum(product, 1) - tl.sum(product, 0)
    narrow = (by_system * b[:, None]).to(solution.dtype)
    for part in range(PARTS):
        row, used = part * BLOCK, KEYS - part * BLOCK
        key = tile(k + row, first, length, key_columns, used, C, BLOCK)
        by_key = tile(by_k + row, first, length, old_columns, used, C, BLOCK).to(tl.float32)
        by_key = tl.dot(tl.trans(narrow), key, tl.dot(narrow, key, by_key))
        put(by_k + row, by_key, first, length, old_columns, used, C, BLOCK)

    # By what rates and decays are made of.
    at = (start + token) * heads + head
    by_rate = by_b * b * (1.0 - b / most)
    tl.store(by_rates + at, by_rate.to(by_rates.dtype.element_ty), mask=inside)
    by_c = tl.where(inside, by_c, 0.0)
    by_fade = tl.where(inside, tl.cumsum(by_c, 0, reverse=True), 0.0)
    x = tl.load(decays + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(offset + head).to(tl.float32)
    by_fade *= -tl.exp(tl.load(log_decay + head).to(tl.float32))
    by_decay = by_fade * tl.sigmoid(x)
    tl.store(by_decays + at, by_decay.to(by_decays.dtype.element_ty), mask=inside)
    place = (batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
    tl.store(by_scalars + 2 * place, tl.sum(by_fade * softplus(x), 0))
    tl.store(by_scalars + 2 * place + 1, tl.sum(by_decay, 0))
