"""The forward of bigplan/kernels/handwritten/state_space.py, which says what its kernels are.

Names of tensors, of a head: `steps` are its tokens' time steps, `reach` is the sum of their decays
from the first token of a chunk to each token, `states` S before each chunk. Heads lie side by side
in a token, EACH of them share a group's keys and queries; steps and reach are [b, heads, s] in
fp32, states [b, heads, chunks, state, head_dim].
"""

from __future__ import annotations

import triton
import triton.language as tl

from bigplan.kernels.handwritten.delta_rule_programs import put, reaches, softplus, tile, within


@triton.jit
def square(x, row_length, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Addresses of a matrix [ROWS, WIDTH] in rows of so many elements."""
    return x + tl.arange(0, ROWS)[:, None] * row_length + tl.arange(0, WIDTH)[None, :]


@triton.jit(do_not_specialize=("length", "heads"))
def stepped(
    times, log_decay, offset, steps, reach, least, most, length, heads, BLOCK: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Time steps of a chunk and of some heads, and how far each token is from the chunk's first."""
    batch = tl.program_id(2)
    token = tl.program_id(0) * C + tl.arange(0, C)[:, None]
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, start = (token < length) & (head < heads), batch.to(tl.int64) * length
    x = tl.load(times + (start + token) * heads + head, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(offset + head, mask=head < heads, other=0.0).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(x), least), most)
    rate = -tl.exp(tl.load(log_decay + head, mask=head < heads, other=0.0).to(tl.float32))
    at = start * heads + head * length + token
    tl.store(steps + at, step, mask=inside)
    tl.store(reach + at, tl.cumsum(tl.where(inside, step * rate, 0.0), 0), mask=inside)


@triton.jit
def step_of(steps, first, length, C: tl.constexpr):
    """Of a chunk's tokens; beyond the sequence 0, as nothing is added there."""
    token = first + tl.arange(0, C)
    return tl.load(steps + token, mask=token < length, other=0.0)


@triton.jit(do_not_specialize=("length", "heads"))
def walked(
    k, v, steps, reach, states, length, heads, EACH: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A part [ROWS, COLUMNS] of a head's states, chunk after chunk."""
    part, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, column = part // (VALUES // COLUMNS) * ROWS, part % (VALUES // COLUMNS) * COLUMNS
    start, chunks = batch.to(tl.int64) * length, tl.cdiv(length, C)
    key_columns, columns = heads // EACH * KEYS, heads * VALUES
    k += start * key_columns + head // EACH * KEYS + row
    v += start * columns + head * VALUES + column
    steps += start * heads + head * length
    reach += start * heads + head * length
    states += (batch * heads + head).to(tl.int64) * chunks * KEYS * VALUES + row * VALUES + column
    state = tl.zeros((ROWS, COLUMNS), tl.float32)
    for chunk in range(chunks):
        first = chunk * C
        tl.store(square(states, VALUES, ROWS, COLUMNS), state.to(states.dtype.element_ty))
        states += KEYS * VALUES
        c = reaches(reach, first, length, C)
        last = tl.load(reach + tl.minimum(first + C, length) - 1)
        key = tile(k, first, length, key_columns, ROWS, C, ROWS)
        lasting = tile(v, first, length, columns, COLUMNS, C, COLUMNS).to(tl.float32)
        lasting = lasting * (step_of(steps, first, length, C) * tl.exp(last - c))[:, None]
        state = state * tl.exp(last) + tl.dot(tl.trans(key), lasting.to(key.dtype))


@triton.jit(do_not_specialize=("length", "heads"))
def read(
    q, k, v, steps, reach, states, skip, out, length, heads, EACH: tl.constexpr,
    TOGETHER: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Y of a chunk, and of TOGETHER heads of a group, whose scores are the same but for fading."""
    chunk, part, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, start = chunk * C, batch.to(tl.int64) * length
    key_columns, columns = heads // EACH * KEYS, heads * VALUES
    here = start * key_columns + part * TOGETHER // EACH * KEYS
    query = tile(q + here, first, length, key_columns, KEYS, C, KEYS)
    scores = tl.dot(query, tl.trans(tile(k + here, first, length, key_columns, KEYS, C, KEYS)))
    for number in range(TOGETHER):
        head = part * TOGETHER + number
        value = tile(v + start * columns + head * VALUES, first, length, columns, VALUES, C, VALUES)
        place = (batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
        state = tl.load(square(states + place * KEYS * VALUES, VALUES, KEYS, VALUES))
        c = reaches(reach + start * heads + head * length, first, length, C)
        step = step_of(steps + start * heads + head * length, first, length, C)
        total = tl.dot(query, state) * tl.exp(c)[:, None]
        inner = scores * within(c, C, False) * step[None, :]
        total += tl.dot(inner.to(value.dtype), value)
        total += tl.load(skip + head).to(tl.float32) * value.to(tl.float32)
        put(out + start * columns + head * VALUES, total, first, length, columns, VALUES, C, VALUES)
