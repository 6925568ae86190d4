"""The backward of bigplan/kernels/handwritten/state_space.py, with state_space_programs.py's names.

`by_x` is the gradient by x. Those by queries and keys are sums over the heads of a program; their
group adds up those of its programs. Sums within a head are in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bigplan.kernels.handwritten.delta_rule_programs import put, reaches, softplus, tile
from bigplan.kernels.handwritten.state_space_programs import square, step_of


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
        query = tile(q, first, length, key_columns, ROWS, C, ROWS)
        given = tile(by_out, first, length, columns, COLUMNS, C, COLUMNS).to(tl.float32)
        given = (given * tl.exp(c)[:, None]).to(query.dtype)
        by_state = by_state * tl.exp(last) + tl.dot(tl.trans(query), given)


@triton.jit(do_not_specialize=("length", "heads"))
def ungiven(
    q, k, v, steps, reach, skip, by_states, by_out, by_q, by_k, by_v, by_steps, by_reach, by_last,
    by_skip, length, heads, EACH: tl.constexpr, TOGETHER: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """By what a chunk's tokens give each other and the state that they leave, of TOGETHER heads.

    Scores have a row for each token that gives, a column for each that asks. `by_reach` and
    `by_last`, by that of the chunk's last token, are not yet by what the chunk asks of states.
    """
    chunk, part, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, start = chunk * C, batch.to(tl.int64) * length
    token = first + tl.arange(0, C)
    inside, end = token < length, tl.minimum(first + C, length) - 1
    key_columns, columns = heads // EACH * KEYS, heads * VALUES
    here = start * key_columns + part * TOGETHER // EACH * KEYS
    query = tile(q + here, first, length, key_columns, KEYS, C, KEYS)
    key = tile(k + here, first, length, key_columns, KEYS, C, KEYS)
    scores = tl.dot(key, tl.trans(query))
    by_key, by_scores = tl.zeros((C, KEYS), tl.float32), tl.zeros((C, C), tl.float32)
    seen = tl.arange(0, C)[:, None] <= tl.arange(0, C)[None, :]
    for number in range(TOGETHER):
        head = part * TOGETHER + number
        there, at = start * columns + head * VALUES, start * heads + head * length
        given = tile(by_out + there, first, length, columns, VALUES, C, VALUES)
        value = tile(v + there, first, length, columns, VALUES, C, VALUES)
        c, last = reaches(reach + at, first, length, C), tl.load(reach + at + end)
        step, left = step_of(steps + at, first, length, C), tl.exp(last - c)
        fading = tl.exp(tl.where(seen, c[None, :] - c[:, None], -float("inf")))

        # By scores, and by how they fade: more for the token that asks, less for that that gives.
        products = tl.dot(value, tl.trans(given)) * fading * step[:, None]
        by_scores += products
        products = products * scores
        by_c = tl.sum(products, 0) - tl.sum(products, 1)
        by_added = tl.dot((scores * fading).to(key.dtype), given)

        place = (batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
        by_state = tl.load(square(by_states + place * KEYS * VALUES, VALUES, KEYS, VALUES))
        lasting = (value.to(tl.float32) * (step * left)[:, None]).to(key.dtype)
        by_key += tl.dot(lasting, tl.trans(by_state))
        wide = value.to(tl.float32)
        through = tl.dot(key, by_state) * left[:, None]
        passed = step * tl.sum(through * wide, 1)
        by_added += through
        tl.store(by_reach + at + token, by_c - passed, mask=inside)
        tl.store(by_last + place, tl.sum(passed, 0))
        tl.store(by_steps + at + token, tl.sum(by_added * wide, 1), mask=inside)
        tl.store(by_skip + place, tl.sum(tl.sum(given.to(tl.float32) * wide, 1), 0))
        factor = tl.load(skip + head).to(tl.float32)
        by_value = by_added * step[:, None] + given.to(tl.float32) * factor
        put(by_v + there, by_value, first, length, columns, VALUES, C, VALUES)
    columns = heads // TOGETHER * KEYS
    there = start * columns + part * KEYS
    narrow = by_scores.to(key.dtype)
    by_key += tl.dot(narrow, query)
    put(by_k + there, by_key, first, length, columns, KEYS, C, KEYS)
    put(by_q + there, tl.dot(tl.trans(narrow), key), first, length, columns, KEYS, C, KEYS)


@triton.jit(do_not_specialize=("length", "heads"))
def unasked(
    q, reach, states, by_states, by_out, by_q, by_reach, by_last, length, heads,
    EACH: tl.constexpr, TOGETHER: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """By what a chunk asks of the states that it finds, and what is left of them: adds to `by_q`,
    `by_reach` and `by_last`.
    """
    chunk, part, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, start = chunk * C, batch.to(tl.int64) * length
    token = first + tl.arange(0, C)
    inside, end = token < length, tl.minimum(first + C, length) - 1
    key_columns, columns = heads // EACH * KEYS, heads * VALUES
    here = start * key_columns + part * TOGETHER // EACH * KEYS
    query = tile(q + here, first, length, key_columns, KEYS, C, KEYS)
    by_query = tl.zeros((C, KEYS), tl.float32)
    same = tl.arange(0, VALUES)[:, None] == tl.arange(0, VALUES)[None, :]
    for number in range(TOGETHER):
        head = part * TOGETHER + number
        at = start * heads + head * length
        given = tile(
            by_out + start * columns + head * VALUES, first, length, columns, VALUES, C, VALUES
        )
        place = (batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
        state = tl.load(square(states + place * KEYS * VALUES, VALUES, KEYS, VALUES))
        by_state = tl.load(square(by_states + place * KEYS * VALUES, VALUES, KEYS, VALUES))
        c, last = reaches(reach + at, first, length, C), tl.load(reach + at + end)
        asked = tl.dot(given, tl.trans(state)) * tl.exp(c)[:, None]
        by_query += asked
        grown = tl.sum(asked * query.to(tl.float32), 1)
        grown += tl.load(by_reach + at + token, mask=inside, other=0.0)
        tl.store(by_reach + at + token, grown, mask=inside)
        # The sum of their products is the trace of one that tensor cores make.
        both = tl.where(same, tl.dot(tl.trans(state), by_state), 0.0)
        both = tl.exp(last) * tl.sum(tl.sum(both, 1), 0)
        tl.store(by_last + place, tl.load(by_last + place) + both)
    columns = heads // TOGETHER * KEYS
    there = start * columns + part * KEYS
    by_query += tile(by_q + there, first, length, columns, KEYS, C, KEYS).to(tl.float32)
    put(by_q + there, by_query, first, length, columns, KEYS, C, KEYS)


@triton.jit(do_not_specialize=("length", "heads"))
def unstepped(
    times, log_decay, offset, steps, by_steps, by_reach, by_last, by_times, by_scalars, least, most,
    length, heads, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of `stepped`; `by_scalars`: of each head and chunk, by log_decay and by offset."""
    chunk, batch = tl.program_id(0), tl.program_id(2)
    token = chunk * C + tl.arange(0, C)[:, None]
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, start = (token < length) & (head < heads), batch.to(tl.int64) * length
    at = start * heads + head * length + token
    by_c = tl.load(by_reach + at, mask=inside, other=0.0)
    place = (batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
    by_end = tl.load(by_last + place, mask=head < heads, other=0.0)
    by_fade = tl.where(inside, tl.cumsum(by_c, 0, reverse=True) + by_end, 0.0)
    rate = -tl.exp(tl.load(log_decay + head, mask=head < heads, other=0.0).to(tl.float32))
    by_step = tl.load(by_steps + at, mask=inside, other=0.0) + by_fade * rate
    fade = tl.load(steps + at, mask=inside, other=0.0) * rate
    at = (start + token) * heads + head
    x = tl.load(times + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(offset + head, mask=head < heads, other=0.0).to(tl.float32)
    free = softplus(x)
    by_time = tl.where((free >= least) & (free <= most), by_step * tl.sigmoid(x), 0.0)
    tl.store(by_times + at, by_time.to(by_times.dtype.element_ty), mask=inside)
    by_scalars += 2 * ((batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk)
    by_log_decay = tl.sum(by_fade * fade, 0, keep_dims=True)
    tl.store(by_scalars, by_log_decay, mask=head < heads)
    tl.store(by_scalars + 1, tl.sum(by_time, 0, keep_dims=True), mask=head < heads)
