"""The backward of bigplan/kernels/state_space.py, with state_space_programs.py's names.

`by_x` is the gradient by x. Those by queries and keys are sums over the heads of a program; their
group adds up those of its programs. Sums within a head are in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bigplan.kernels.delta_rule_programs import put, reaches, softplus, square, tile, within
from bigplan.kernels.state_space_programs import step_of


@triton.jit(do_not_specialize=("length", "heads"))
def walked_back(
    q, by_out, reach, by_states, length, heads, EACH: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Gradients by a part of the states after each chunk, from the last chunk on."""
    part, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, column = part // (VALUES // COLUMNS) * ROWS, part % (VALUES // COLUMNS) * COLUMNS
    start, chunks = batch.to(tl.int64) * length, tl.cdiv(length, C)
    key_columns, columns = heads // EACH * KEYS, heads * VALUES
    q += start * key_columns + head // EACH * KEYS + row
    by_out += start * columns + head * VALUES + column
    reach += start * heads + head * length
    by_states += (batch * heads + head + 1).to(tl.int64) * chunks * KEYS * VALUES
    by_states += row * VALUES + column
    by_state = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(chunks):
        first = (chunks - 1 - number) * C
        by_states -= KEYS * VALUES
        tl.store(square(by_states, VALUES, ROWS, COLUMNS), by_state.to(by_states.dtype.element_ty))
        c = reaches(reach, first, length, C)
        last = tl.load(reach + tl.minimum(first + C, length) - 1)
        query = tile(q, first, length, key_columns, C, ROWS)
        given = tile(by_out, first, length, columns, C, COLUMNS).to(tl.float32)
        given = (given * tl.exp(c)[:, None]).to(query.dtype)
        by_state = by_state * tl.exp(last) + tl.dot(tl.trans(query), given)


@triton.jit(do_not_specialize=("length", "heads"))
def unread(
    q, k, v, times, log_decay, offset, skip, steps, reach, states, by_states, by_out, by_q, by_k,
    by_v, by_times, by_scalars, least, most, length, heads, EACH: tl.constexpr,
    TOGETHER: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of Y and of the state that a chunk leaves, by all that made them, of TOGETHER heads.

    `by_scalars`: of each head and chunk, by log_decay, offset and skip.
    """
    chunk, part, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, start = chunk * C, batch.to(tl.int64) * length
    token = first + tl.arange(0, C)
    inside, end = token < length, tl.minimum(first + C, length) - 1
    key_columns, columns = heads // EACH * KEYS, heads * VALUES
    here = start * key_columns + part * TOGETHER // EACH * KEYS
    query = tile(q + here, first, length, key_columns, C, KEYS)
    key = tile(k + here, first, length, key_columns, C, KEYS)
    scores = tl.dot(query, tl.trans(key))
    by_query, by_key = tl.zeros((C, KEYS), tl.float32), tl.zeros((C, KEYS), tl.float32)
    by_scores = tl.zeros((C, C), tl.float32)
    for number in range(TOGETHER):
        head = part * TOGETHER + number
        there, at = start * columns + head * VALUES, start * heads + head * length
        given = tile(by_out + there, first, length, columns, C, VALUES)
        value = tile(v + there, first, length, columns, C, VALUES)
        wide_given, wide_value = given.to(tl.float32), value.to(tl.float32)
        c, last = reaches(reach + at, first, length, C), tl.load(reach + at + end)
        step, left = step_of(steps + at, first, length, C), tl.exp(last - c)
        fading = within(c, C, False)

        # By scores, and by how they fade: all of a row with its token, of a column against it.
        products = tl.dot(given, tl.trans(value)) * fading * step[None, :]
        by_scores += products
        products = products * scores
        by_c = tl.sum(products, 1) - tl.sum(products, 0)
        by_added = tl.dot(tl.trans((scores * fading).to(key.dtype)), given)

        # By what the chunk leaves in the state.
        place = (batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
        by_state = tl.load(square(by_states + place * KEYS * VALUES, VALUES, KEYS, VALUES))
        through = tl.dot(key, by_state) * left[:, None]
        by_added += through
        passed = step * tl.sum(through * wide_value, 1)
        by_c -= passed
        by_key += tl.dot(value, tl.trans(by_state)) * (step * left)[:, None]

        # By the state that it finds.
        state = tl.load(square(states + place * KEYS * VALUES, VALUES, KEYS, VALUES))
        asked = tl.dot(given, tl.trans(state)) * tl.exp(c)[:, None]
        by_query += asked
        by_c += tl.sum(asked * query.to(tl.float32), 1)
        both = tl.sum(tl.sum(state.to(tl.float32) * by_state.to(tl.float32), 1), 0)
        by_last = tl.sum(passed, 0) + tl.exp(last) * both

        factor = tl.load(skip + head).to(tl.float32)
        by_value = by_added * step[:, None] + wide_given * factor
        put(by_v + there, by_value, first, length, columns, C, VALUES)

        # By time steps, which add and fade, and by what makes them.
        rate = -tl.exp(tl.load(log_decay + head).to(tl.float32))
        by_fade = tl.cumsum(tl.where(inside, by_c, 0.0), 0, reverse=True) + by_last
        by_fade = tl.where(inside, by_fade, 0.0)
        by_step = tl.sum(by_added * wide_value, 1) + by_fade * rate
        at = (start + token) * heads + head
        x = tl.load(times + at, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(offset + head).to(tl.float32)
        free = softplus(x)
        by_time = tl.where((free >= least) & (free <= most), by_step * tl.sigmoid(x), 0.0)
        tl.store(by_times + at, by_time.to(by_times.dtype.element_ty), mask=inside)
        by_scalar = by_scalars + 3 * place
        tl.store(by_scalar, tl.sum(by_fade * step, 0) * rate)
        tl.store(by_scalar + 1, tl.sum(tl.where(inside, by_time, 0.0), 0))
        tl.store(by_scalar + 2, tl.sum(tl.sum(wide_given * wide_value, 1), 0))
    narrow = by_scores.to(key.dtype)
    by_query += tl.dot(narrow, key)
    by_key += tl.dot(tl.trans(narrow), query)
    columns = heads // TOGETHER * KEYS
    there = start * columns + part * KEYS
    put(by_q + there, by_query, first, length, columns, C, KEYS)
    put(by_k + there, by_key, first, length, columns, C, KEYS)
