"""The forward of bigplan/kernels/delta_rule.py, which says what its kernels are.

Names of tensors, of a head: `reach` is the sum of g from its chunk's first token to each token,
`old` W, `own` U and then V', `inverse` (I + tril(b K K^T L, -1))^-1, `states` S before each chunk.
Heads lie side by side in a token; reach and rates are [b, heads, s] in fp32, states
[b, heads, chunks, key_dim, value_dim].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile(x, first, length, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens `first` and after of one head, [ROWS, WIDTH]; zeros beyond the sequence."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = x + tl.cast(first, tl.int64) * columns + (row[:, None] * columns + column[None, :])
    return tl.load(at, mask=(first + row < length)[:, None], other=0.0)


@triton.jit
def put(x, value, first, length, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Store what `tile` loads."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = x + tl.cast(first, tl.int64) * columns + (row[:, None] * columns + column[None, :])
    tl.store(at, value.to(x.dtype.element_ty), mask=(first + row < length)[:, None])


@triton.jit
def reaches(reach, first, length, C: tl.constexpr):
    """Of a chunk's tokens; beyond the sequence that of its last, since nothing fades there."""
    return tl.load(reach + tl.minimum(first + tl.arange(0, C), length - 1))


@triton.jit
def square(x, row_length, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Addresses of a matrix [ROWS, WIDTH] in rows of so many elements."""
    return x + tl.arange(0, ROWS)[:, None] * row_length + tl.arange(0, WIDTH)[None, :]


@triton.jit
def within(reach, C: tl.constexpr, STRICTLY: tl.constexpr):
    """L: how far the state fades from token j to token i >= j, or i > j; else 0."""
    i = tl.arange(0, C)
    seen = i[:, None] > i[None, :] if STRICTLY else i[:, None] >= i[None, :]
    return tl.where(seen, tl.exp(tl.where(seen, reach[:, None] - reach[None, :], 0.0)), 0.0)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of any x."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _inverted(system, C: tl.constexpr, DOUBLINGS: tl.constexpr):
    """Of I + system, a strict lower triangle [C, C] in fp32.

    The inverse of blocks along the diagonal gives that of blocks twice as wide: the corner between
    two of them is the system's own between their inverses, negative. No element exceeds 1 by much,
    as each is what is left of a key after others' updates, so tf32 does for the products.
    """
    i = tl.arange(0, C)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for doubling in tl.static_range(DOUBLINGS):
        row, column = i[:, None] >> doubling, i[None, :] >> doubling
        corner = tl.where((row >> 1 == column >> 1) & (row > column), system, 0.0)
        if doubling == 0:
            inverse -= corner
        else:
            inverse -= tl.dot(tl.dot(inverse, corner), inverse)
    return inverse


@triton.jit(do_not_specialize=("length", "heads"))
def solved(
    k, v, rates, decays, log_decay, offset, own, old, inverse, rate, reach, length, heads,
    EACH: tl.constexpr, KEEP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    C: tl.constexpr, DOUBLINGS: tl.constexpr,
):  # fmt: skip
    """U and W of a chunk and head; KEEP: the inverse as well."""
    first, head, batch = tl.program_id(0) * C, tl.program_id(1), tl.program_id(2)
    token = first + tl.arange(0, C)
    inside, start = token < length, batch.to(tl.int64) * length
    at = (start + token) * heads + head
    b = tl.sigmoid(tl.load(rates + at, mask=inside, other=0.0).to(tl.float32))
    decay = tl.load(decays + at, mask=inside, other=0.0).to(tl.float32)
    decay = softplus(decay + tl.load(offset + head).to(tl.float32))
    fade = -tl.exp(tl.load(log_decay + head).to(tl.float32)) * decay
    b, c = tl.where(inside, b, 0.0), tl.cumsum(tl.where(inside, fade, 0.0), 0)
    at = start * heads + head * length + token
    tl.store(rate + at, b, mask=inside)
    tl.store(reach + at, c, mask=inside)
    columns = heads // EACH * KEYS
    key = tile(k + start * columns + head // EACH * KEYS, first, length, columns, C, KEYS)
    system = b[:, None] * tl.dot(key, tl.trans(key)) * within(c, C, True)
    solution = _inverted(system, C, DOUBLINGS).to(key.dtype)
    if KEEP:
        columns = heads * C
        put(inverse + start * columns + head * C, solution, first, length, columns, C, C)
    faded = ((b * tl.exp(c))[:, None] * key.to(tl.float32)).to(key.dtype)
    columns = heads * KEYS
    result = tl.dot(solution, faded)
    put(old + start * columns + head * KEYS, result, first, length, columns, C, KEYS)
    columns = heads * VALUES
    here = start * columns + head * VALUES
    value = tile(v + here, first, length, columns, C, VALUES)
    scaled = (b[:, None] * value.to(tl.float32)).to(key.dtype)
    put(own + here, tl.dot(solution, scaled), first, length, columns, C, VALUES)


@triton.jit(do_not_specialize=("length", "heads"))
def walked(
    k, own, old, reach, states, length, heads, EACH: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's states, chunk after chunk; U becomes V' in place."""
    part, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, chunks = batch.to(tl.int64) * length, tl.cdiv(length, C)
    key_columns, old_columns, columns = heads // EACH * KEYS, heads * KEYS, heads * VALUES
    k += start * key_columns + head // EACH * KEYS
    old += start * old_columns + head * KEYS
    own += start * columns + head * VALUES + part * BLOCK
    reach += start * heads + head * length
    states += (batch * heads + head).to(tl.int64) * chunks * KEYS * VALUES + part * BLOCK
    state = tl.zeros((KEYS, BLOCK), tl.float32)
    for chunk in range(chunks):
        first = chunk * C
        narrow = state.to(k.dtype.element_ty)
        tl.store(square(states, VALUES, KEYS, BLOCK), narrow)
        states += KEYS * VALUES
        known = tl.dot(tile(old, first, length, old_columns, C, KEYS), narrow)
        new = tile(own, first, length, columns, C, BLOCK).to(tl.float32) - known
        put(own, new, first, length, columns, C, BLOCK)
        c = reaches(reach, first, length, C)
        last = tl.load(reach + tl.minimum(first + C, length) - 1)
        faded = (new * tl.exp(last - c)[:, None]).to(narrow.dtype)
        key = tile(k, first, length, key_columns, C, KEYS)
        state = state * tl.exp(last) + tl.dot(tl.trans(key), faded)


@triton.jit
def values(query, key, own, state, c, C: tl.constexpr):
    """O of a chunk, in fp32."""
    scores = tl.dot(query, tl.trans(key)) * within(c, C, False)
    total = tl.dot(query, state) * tl.exp(c)[:, None]
    return total + tl.dot(scores.to(own.dtype), own)


@triton.jit(do_not_specialize=("length", "heads"))
def read(
    q, k, own, states, reach, gates, weight, out, epsilon, length, heads, EACH: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """What a chunk's queries read of a head, normed and gated."""
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
    normed = total * tl.rsqrt(tl.sum(total * total, 1) / VALUES + epsilon)[:, None]
    gate = tile(gates + there, first, length, columns, C, VALUES).to(tl.float32)
    factor = tl.load(weight + tl.arange(0, VALUES)).to(tl.float32)[None, :]
    result = normed * factor * gate * tl.sigmoid(gate)
    put(out + there, result, first, length, columns, C, VALUES)
