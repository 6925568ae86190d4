"""The backward of bigplan/kernels/delta_rule.py, with delta_rule_programs.py's names.

`by_x` is the gradient by x. Those by queries and keys are of each value head; its key head adds
them up. Sums within a head are in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bigplan.kernels.delta_rule_programs import (
    put,
    reaches,
    softplus,
    square,
    tile,
    values,
    within,
)


@triton.jit(do_not_specialize=("length", "heads"))
def ungated(
    q, k, own, states, reach, gates, weight, gradient, by_read, by_gates, by_weight, epsilon,
    length, heads, EACH: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of the norm and the gate, for which O is made again; `by_weight` of each chunk and head."""
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, start = chunk * C, batch.to(tl.int64) * length
    key_columns, columns = heads // EACH * KEYS, heads * VALUES
    here, there = start * key_columns + head // EACH * KEYS, start * columns + head * VALUES
    query = tile(q + here, first, length, key_columns, C, KEYS)
    key = tile(k + here, first, length, key_columns, C, KEYS)
    new = tile(own + there, first, length, columns, C, VALUES)
    place = (batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
    state = tl.load(square(states + place * KEYS * VALUES, VALUES, KEYS, VALUES))
    c = reaches(reach + start * heads + head * length, first, length, C)
    total = values(query, key, new, state, c, C)
    factor = tl.rsqrt(tl.sum(total * total, 1) / VALUES + epsilon)[:, None]
    normed = total * factor
    given = tile(gradient + there, first, length, columns, C, VALUES).to(tl.float32)
    gate = tile(gates + there, first, length, columns, C, VALUES).to(tl.float32)
    scale = tl.load(weight + tl.arange(0, VALUES)).to(tl.float32)[None, :]
    share = tl.sigmoid(gate)
    by_gate = given * normed * scale * share * (1.0 + gate * (1.0 - share))
    put(by_gates + there, by_gate, first, length, columns, C, VALUES)
    given = given * gate * share
    tl.store(by_weight + place * VALUES + tl.arange(0, VALUES), tl.sum(given * normed, 0))
    given = given * scale
    along = tl.sum(given * normed, 1)[:, None] / VALUES
    put(by_read + there, (given - normed * along) * factor, first, length, columns, C, VALUES)


@triton.jit(do_not_specialize=("length", "heads"))
def unread(
    q, k, own, states, reach, by_read, by_own, by_q, by_k, by_reach, length, heads,
    EACH: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of O, by a chunk's V', Q and K; not yet by what they leave in the state."""
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, start = chunk * C, batch.to(tl.int64) * length
    key_columns, columns = heads // EACH * KEYS, heads * VALUES
    here, there = start * key_columns + head // EACH * KEYS, start * columns + head * VALUES
    query = tile(q + here, first, length, key_columns, C, KEYS)
    key = tile(k + here, first, length, key_columns, C, KEYS)
    given = tile(by_read + there, first, length, columns, C, VALUES)
    at = start * heads + head * length
    c = reaches(reach + at, first, length, C)
    scores = tl.dot(query, tl.trans(key)) * within(c, C, False)
    by_new = tl.dot(tl.trans(scores.to(key.dtype)), given)
    put(by_own + there, by_new, first, length, columns, C, VALUES)

    new = tile(own + there, first, length, columns, C, VALUES)
    by_scores = (tl.dot(given, tl.trans(new)) * within(c, C, False)).to(key.dtype)
    place = (batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
    state = tl.load(square(states + place * KEYS * VALUES, VALUES, KEYS, VALUES))
    by_query = tl.dot(given, tl.trans(state)) * tl.exp(c)[:, None] + tl.dot(by_scores, key)
    columns = heads * KEYS
    there = start * columns + head * KEYS
    put(by_q + there, by_query, first, length, columns, C, KEYS)
    # All that a query gives grows with exp(c) of its token, all of a key's scores with exp(-c).
    grown = tl.sum(by_query * query.to(tl.float32), 1)
    by_key = tl.dot(tl.trans(by_scores), query)
    put(by_k + there, by_key, first, length, columns, C, KEYS)
    grown -= tl.sum(by_key * key.to(tl.float32), 1)
    token = first + tl.arange(0, C)
    tl.store(by_reach + at + token, grown, mask=token < length)


@triton.jit(do_not_specialize=("length", "heads"))
def walked_back(
    q, k, old, reach, by_read, by_own, by_states, length, heads, EACH: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
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
    by_state = tl.zeros((KEYS, BLOCK), tl.float32)
    for number in range(chunks):
        first = (chunks - 1 - number) * C
        by_states -= KEYS * VALUES
        narrow = by_state.to(k.dtype.element_ty)
        tl.store(square(by_states, VALUES, KEYS, BLOCK), narrow)
        c = reaches(reach, first, length, C)
        last = tl.load(reach + tl.minimum(first + C, length) - 1)
        key = tile(k, first, length, key_columns, C, KEYS)
        by_new = tl.dot(key, narrow) * tl.exp(last - c)[:, None]
        by_new += tile(by_own, first, length, columns, C, BLOCK).to(tl.float32)
        put(by_own, by_new, first, length, columns, C, BLOCK)
        given = tile(by_read, first, length, columns, C, BLOCK).to(tl.float32)
        given = (given * tl.exp(c)[:, None]).to(narrow.dtype)
        query = tile(q, first, length, key_columns, C, KEYS)
        known = tile(old, first, length, old_columns, C, KEYS)
        by_state = by_state * tl.exp(last) + tl.dot(tl.trans(query), given)
        by_state -= tl.dot(tl.trans(known), by_new.to(narrow.dtype))


@triton.jit(do_not_specialize=("length", "heads"))
def unsolved(
    k, v, rates, decays, log_decay, offset, own, inverse, rate, reach, states, by_states, by_own,
    by_k, by_reach, by_v, by_rates, by_decays, by_scalars, length, heads, EACH: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of `solved`, and of the state that a chunk leaves, by K, V, b and g; adds to `by_k`.

    `by_scalars`: of each chunk and head, by log_decay and by offset.
    """
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, start = chunk * C, batch.to(tl.int64) * length
    token = first + tl.arange(0, C)
    inside, at = token < length, start * heads + head * length
    c = reaches(reach + at, first, length, C)
    b = tl.load(rate + at + token, mask=inside, other=0.0)
    last = tl.load(reach + at + tl.minimum(first + C, length) - 1)
    columns = heads // EACH * KEYS
    key = tile(k + start * columns + head // EACH * KEYS, first, length, columns, C, KEYS)
    wide_key = key.to(tl.float32)
    place = (batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
    by_state = tl.load(square(by_states + place * KEYS * VALUES, VALUES, KEYS, VALUES))
    columns = heads * VALUES
    there = start * columns + head * VALUES
    new = tile(own + there, first, length, columns, C, VALUES)

    # By what V' leaves in the state.
    by_key = tl.dot(new, tl.trans(by_state)) * tl.exp(last - c)[:, None]
    left = tl.sum(by_key * wide_key, 1)
    state = tl.load(square(states + place * KEYS * VALUES, VALUES, KEYS, VALUES))
    both = tl.sum(tl.sum(state.to(tl.float32) * by_state.to(tl.float32), 1), 0)
    by_last = tl.sum(left, 0) + tl.exp(last) * both
    by_c = tl.load(by_reach + at + token, mask=inside, other=0.0) - left

    # By the system's right side and its inverse: U, and W, whose gradient is -V' S^T's.
    by_new = tile(by_own + there, first, length, columns, C, VALUES)
    by_old = (-tl.dot(by_new, tl.trans(state))).to(key.dtype)
    columns = heads * C
    solution = tile(inverse + start * columns + head * C, first, length, columns, C, C)
    columns = heads * VALUES
    value = tile(v + there, first, length, columns, C, VALUES).to(tl.float32)
    by_scaled = tl.dot(tl.trans(solution), by_new)
    put(by_v + there, by_scaled * b[:, None], first, length, columns, C, VALUES)
    by_b = tl.sum(by_scaled * value, 1)
    by_inverse = tl.dot(by_new, tl.trans((value * b[:, None]).to(key.dtype)))
    faded = b * tl.exp(c)
    by_inverse += tl.dot(by_old, tl.trans((wide_key * faded[:, None]).to(key.dtype)))
    by_faded = tl.dot(tl.trans(solution), by_old)
    along = tl.sum(by_faded * wide_key, 1)
    by_key += by_faded * faded[:, None]
    by_b += along * tl.exp(c)
    by_c += along * faded

    # By the system.
    turned = tl.trans(solution)
    by_system = -tl.dot(turned, tl.dot(by_inverse.to(key.dtype), turned).to(key.dtype)) * within(
        c, C, True
    )
    products = by_system * tl.dot(key, tl.trans(key))
    by_b += tl.sum(products, 1)
    products = products * b[:, None]
    by_c += tl.sum(products, 1) - tl.sum(products, 0)
    by_products = (by_system * b[:, None]).to(key.dtype)
    by_key += tl.dot(by_products, key) + tl.dot(tl.trans(by_products), key)
    columns = heads * KEYS
    there = start * columns + head * KEYS
    by_key += tile(by_k + there, first, length, columns, C, KEYS).to(tl.float32)
    put(by_k + there, by_key, first, length, columns, C, KEYS)

    # By what rates and decays are made of.
    at = (start + token) * heads + head
    tl.store(by_rates + at, (by_b * b * (1.0 - b)).to(by_rates.dtype.element_ty), mask=inside)
    by_c = tl.where(inside, by_c, 0.0)
    by_fade = tl.where(inside, tl.cumsum(by_c, 0, reverse=True) + by_last, 0.0)
    x = tl.load(decays + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(offset + head).to(tl.float32)
    by_fade *= -tl.exp(tl.load(log_decay + head).to(tl.float32))
    by_decay = by_fade * tl.sigmoid(x)
    tl.store(by_decays + at, by_decay.to(by_decays.dtype.element_ty), mask=inside)
    tl.store(by_scalars + 2 * place, tl.sum(by_fade * softplus(x), 0))
    tl.store(by_scalars + 2 * place + 1, tl.sum(by_decay, 0))
