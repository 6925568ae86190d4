"""The forward of bigplan/kernels/handwritten/delta_rule.py, which says what its kernels are.

Names of tensors, of a head: `reach` is the sum of g from its chunk's first token to each token,
`old` W, `own` U and then V', `inverse` (I + tril(b K K^T L, -1))^-1, `states` S before each chunk.
Heads lie side by side in a token; reach and rates are [b, heads, s] in fp32, states
[b, heads, chunks, key_dim, value_dim]. Keys and values pass in blocks of BLOCK columns, the last of
keys filled up with zeros, so that tiles fit a program's registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Added to reach where a document begins: exp(-128) is 0 in fp32, so nothing reaches over it. Sums
# near it are exact to 2^-17, where factors of products are rounded to 2^-9.
APART = tl.constexpr(-128.0)


@triton.jit
def _seen(first, length, used, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return (first + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, WIDTH) < used)[None, :]


@triton.jit
def tile(x, first, length, columns, used, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows `first` and after, [ROWS, WIDTH]; zeros beyond `length` rows and `used` columns."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = x + tl.cast(first, tl.int64) * columns + (row[:, None] * columns + column[None, :])
    return tl.load(at, mask=_seen(first, length, used, ROWS, WIDTH), other=0.0)


@triton.jit
def put(x, value, first, length, columns, used, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Store what `tile` loads."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = x + tl.cast(first, tl.int64) * columns + (row[:, None] * columns + column[None, :])
    tl.store(at, value.to(x.dtype.element_ty), mask=_seen(first, length, used, ROWS, WIDTH))


@triton.jit
def reaches(reach, first, length, C: tl.constexpr):
    """Of a chunk's tokens; beyond the sequence that of its last, since nothing fades there."""
    return tl.load(reach + tl.minimum(first + tl.arange(0, C), length - 1))


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
    two of them is the system's own between their inverses, negative. No element exceeds the largest
    rate by much, as each is what is left of a key after others' updates, so tf32 does for the
    products.
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
    k, v, rates, decays, log_decay, offset, begins, own, old, inverse, rate, reach, most, length,
    heads, EACH: tl.constexpr, KEEP: tl.constexpr, DOCUMENTS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
    DOUBLINGS: tl.constexpr,
):  # fmt: skip
    """U and W of a chunk and head, of rates up to `most`; KEEP: the inverse as well."""
    first, head, batch = tl.program_id(0) * C, tl.program_id(1), tl.program_id(2)
    token = first + tl.arange(0, C)
    inside, start = token < length, batch.to(tl.int64) * length
    at = (start + token) * heads + head
    b = most * tl.sigmoid(tl.load(rates + at, mask=inside, other=0.0).to(tl.float32))
    decay = tl.load(decays + at, mask=inside, other=0.0).to(tl.float32)
    decay = softplus(decay + tl.load(offset + head).to(tl.float32))
    fade = -tl.exp(tl.load(log_decay + head).to(tl.float32)) * decay
    if DOCUMENTS:
        begin = tl.load(begins + start + token, mask=inside, other=0)
        fade += tl.where((begin == token) & (token > 0), APART, 0.0)
    b, c = tl.where(inside, b, 0.0), tl.cumsum(tl.where(inside, fade, 0.0), 0)
    at = start * heads + head * length + token
    tl.store(rate + at, b, mask=inside)
    tl.store(reach + at, c, mask=inside)
    key_columns, columns = heads // EACH * KEYS, heads * KEYS
    here, there = start * key_columns + head // EACH * KEYS, start * columns + head * KEYS
    product = tl.zeros((C, C), tl.float32)
    for part in range(PARTS):
        row, used = part * BLOCK, KEYS - part * BLOCK
        key = tile(k + here + row, first, length, key_columns, used, C, BLOCK)
        product = tl.dot(key, tl.trans(key), product)
    solution = _inverted(b[:, None] * product * within(c, C, True), C, DOUBLINGS)
    solution = solution.to(k.dtype.element_ty)
    if KEEP:
        to = inverse + start * heads * C + head * C
        put(to, solution, first, length, heads * C, C, C, C)
    faded = (b * tl.exp(c))[:, None]
    for part in range(PARTS):
        row, used = part * BLOCK, KEYS - part * BLOCK
        key = tile(k + here + row, first, length, key_columns, used, C, BLOCK).to(tl.float32)
        result = tl.dot(solution, (key * faded).to(solution.dtype))
        put(old + there + row, result, first, length, columns, used, C, BLOCK)
    columns = heads * VALUES
    here = start * columns + head * VALUES
    for column in range(0, VALUES, BLOCK):
        value = tile(v + here + column, first, length, columns, BLOCK, C, BLOCK).to(tl.float32)
        result = tl.dot(solution, (b[:, None] * value).to(solution.dtype))
        put(own + here + column, result, first, length, columns, BLOCK, C, BLOCK)


@triton.jit(do_not_specialize=("length", "heads"))
def walked(
    k, own, old, reach, states, length, heads, EACH: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
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
    state = tl.zeros((K, BLOCK), tl.float32)
    for chunk in range(chunks):
        first = chunk * C
        narrow = state.to(k.dtype.element_ty)
        put(states, narrow, 0, KEYS, VALUES, BLOCK, K, BLOCK)
        states += KEYS * VALUES
        known = tl.dot(tile(old, first, length, old_columns, KEYS, C, K), narrow)
        new = tile(own, first, length, columns, BLOCK, C, BLOCK).to(tl.float32) - known
        put(own, new, first, length, columns, BLOCK, C, BLOCK)
        c = reaches(reach, first, length, C)
        last = tl.load(reach + tl.minimum(first + C, length) - 1)
        faded = (new * tl.exp(last - c)[:, None]).to(narrow.dtype)
        key = tile(k, first, length, key_columns, KEYS, C, K)
        state = state * tl.exp(last) + tl.dot(tl.trans(key), faded)


@triton.jit
def scores_of(
    query, key, c, first, length, columns, KEYS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Q K^T L of a chunk, of addresses of queries and keys, in their dtype."""
    total = tl.zeros((C, C), tl.float32)
    for part in range(PARTS):
        row, used = part * BLOCK, KEYS - part * BLOCK
        left = tile(query + row, first, length, columns, used, C, BLOCK)
        right = tile(key + row, first, length, columns, used, C, BLOCK)
        total = tl.dot(left, tl.trans(right), total)
    return (total * within(c, C, False)).to(query.dtype.element_ty)


@triton.jit(do_not_specialize=("length", "heads"))
def read(
    q, k, own, states, reach, out, length, heads, EACH: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """O: what a chunk's queries read of a head."""
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, start = chunk * C, batch.to(tl.int64) * length
    key_columns, columns = heads // EACH * KEYS, heads * VALUES
    here, there = start * key_columns + head // EACH * KEYS, start * columns + head * VALUES
    c = reaches(reach + start * heads + head * length, first, length, C)
    scores = scores_of(q + here, k + here, c, first, length, key_columns, KEYS, PARTS, BLOCK, C)
    place = (batch * heads + head).to(tl.int64) * tl.num_programs(0) + chunk
    states += place * KEYS * VALUES
    for column in range(0, VALUES, BLOCK):
        total = tl.zeros((C, BLOCK), tl.float32)
        for part in range(PARTS):
            row, used = part * BLOCK, KEYS - part * BLOCK
            query = tile(q + here + row, first, length, key_columns, used, C, BLOCK)
            state = tile(states + column, row, KEYS, VALUES, BLOCK, BLOCK, BLOCK)
            total = tl.dot(query, state, total)
        new = tile(own + there + column, first, length, columns, BLOCK, C, BLOCK)
        total = tl.dot(scores, new, total * tl.exp(c)[:, None])
        put(out + there + column, total, first, length, columns, BLOCK, C, BLOCK)
