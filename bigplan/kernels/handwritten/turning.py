"""Heads of latent attention, written by hand: columns that rope turns in place, keys put together.

Plain torch (runtime/attention/latent.py) turns in five kernels, of which three read or write every
second column, and joins keys in eight. Each of these kernels takes a head's columns once. What is
turned is turned in fp32 and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

HEADS = 16  # of a token, that a program has at a time


@triton.jit
def _pair(INTERLEAVED: tl.constexpr, HALF: tl.constexpr, i):
    """The columns that turn together."""
    if INTERLEAVED:
        return 2 * i, 2 * i + 1
    return i, i + HALF


@triton.jit
def _angles(cos, sin, at, i, there, HALF: tl.constexpr):
    place = at * HALF + i
    c = tl.load(cos + place, mask=there, other=0.0).to(tl.float32)
    return c, tl.load(sin + place, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _turn(
    x, cos, sin, length, heads, by_batch, by_token, by_head, by_column, INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Some heads of a token, in place."""
    token = tl.program_id(0).to(tl.int64)
    at, i = token % length, tl.arange(0, COLUMNS)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    c, s = _angles(cos, sin, at, i, i < HALF, HALF)
    if BACK:
        s = -s
    first, second = _pair(INTERLEAVED, HALF, i)
    rows = x + (token // length) * by_batch + at * by_token + head[:, None] * by_head
    inside = (head < heads)[:, None] & (i < HALF)[None, :]
    one, two = rows + first[None, :] * by_column, rows + second[None, :] * by_column
    a = tl.load(one, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(two, mask=inside, other=0.0).to(tl.float32)
    tl.store(one, (a * c - b * s).to(x.dtype.element_ty), mask=inside)
    tl.store(two, (b * c + a * s).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _join(
    plain, shared, keys, cos, sin, length, heads, INTERLEAVED: tl.constexpr, PLAIN: tl.constexpr,
    WIDE: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Some heads' keys of a token: their plain columns, and the shared ones turned."""
    token = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, COLUMNS), tl.arange(0, WIDE)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    own, width = token * heads + head[:, None], PLAIN + 2 * HALF
    inside = (head < heads)[:, None] & (j < PLAIN)[None, :]
    value = tl.load(plain + own * PLAIN + j[None, :], mask=inside, other=0.0)
    tl.store(keys + own * width + j[None, :], value, mask=inside)
    c, s = _angles(cos, sin, token % length, i, i < HALF, HALF)
    first, second = _pair(INTERLEAVED, HALF, i)
    a = tl.load(shared + token * 2 * HALF + first, mask=i < HALF, other=0.0).to(tl.float32)
    b = tl.load(shared + token * 2 * HALF + second, mask=i < HALF, other=0.0).to(tl.float32)
    last, inside = keys + own * width + PLAIN, (head < heads)[:, None] & (i < HALF)[None, :]
    every = tl.zeros((HEADS, COLUMNS), dtype=tl.float32)
    tl.store(
        last + first[None, :], (every + (a * c - b * s)).to(keys.dtype.element_ty), mask=inside
    )
    tl.store(
        last + second[None, :], (every + (b * c + a * s)).to(keys.dtype.element_ty), mask=inside
    )


@triton.jit
def _part(
    by_keys, by_plain, by_shared, cos, sin, length, heads, by_batch, by_token, by_head, by_column,
    INTERLEAVED: tl.constexpr, PLAIN: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """All heads of a token: gradients by plain columns, and the sum of the others turned back."""
    token = tl.program_id(0).to(tl.int64)
    at, i, j = token % length, tl.arange(0, COLUMNS), tl.arange(0, WIDE)
    first, second = _pair(INTERLEAVED, HALF, i)
    rows = by_keys + (token // length) * by_batch + at * by_token
    a, b = tl.zeros((COLUMNS,), dtype=tl.float32), tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)
        row = rows + head[:, None] * by_head
        inside = (head < heads)[:, None] & (j < PLAIN)[None, :]
        value = tl.load(row + j[None, :] * by_column, mask=inside, other=0.0)
        to = by_plain + (token * heads + head[:, None]) * PLAIN + j[None, :]
        tl.store(to, value, mask=inside)
        last, inside = row + PLAIN * by_column, (head < heads)[:, None] & (i < HALF)[None, :]
        one = tl.load(last + first[None, :] * by_column, mask=inside, other=0.0)
        two = tl.load(last + second[None, :] * by_column, mask=inside, other=0.0)
        a += tl.sum(one.to(tl.float32), 0)
        b += tl.sum(two.to(tl.float32), 0)
    c, s = _angles(cos, sin, at, i, i < HALF, HALF)
    last = by_shared + token * 2 * HALF
    tl.store(last + first, (a * c + b * s).to(last.dtype.element_ty), mask=i < HALF)
    tl.store(last + second, (b * c - a * s).to(last.dtype.element_ty), mask=i < HALF)


def turn_(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, back: bool = False) -> None:
    """Turn x [b, s, heads, r], of any strides, in place; cos and sin [s, r / 2], contiguous.

    Columns 2 i and 2 i + 1 turn together if interleaved, else i and i + r / 2.
    """
    batch, length, heads, width = x.shape
    half = width // 2
    _turn[batch * length, triton.cdiv(heads, HEADS)](
        x, cos, sin, length, heads, *x.stride(), INTERLEAVED=interleaved, BACK=back, HALF=half,
        COLUMNS=next_power_of_2(half), HEADS=HEADS,
    )  # fmt: skip


def joined(plain: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Keys [b, s, heads, p + r] of plain columns [b, s, heads, p] and shared ones [b, s, r]."""
    plain, shared = plain.contiguous(), shared.contiguous()
    (batch, length, heads, width), half = plain.shape, shared.shape[-1] // 2
    keys = plain.new_empty(batch, length, heads, width + 2 * half)
    _join[batch * length, triton.cdiv(heads, HEADS)](
        plain, shared, keys, cos, sin, length, heads, INTERLEAVED=interleaved, PLAIN=width,
        WIDE=next_power_of_2(width), HALF=half, COLUMNS=next_power_of_2(half), HEADS=HEADS,
    )  # fmt: skip
    return keys


def parted(
    by_keys: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Gradients by plain columns and by shared ones, of that by keys, of any strides."""
    (batch, length, heads, width), half = by_keys.shape, cos.shape[-1]
    plain = width - 2 * half
    by_plain = by_keys.new_empty(batch, length, heads, plain)
    by_shared = by_keys.new_empty(batch, length, 2 * half)
    _part[batch * length,](
        by_keys, by_plain, by_shared, cos, sin, length, heads, *by_keys.stride(),
        INTERLEAVED=interleaved, PLAIN=plain, WIDE=next_power_of_2(plain), HALF=half,
        COLUMNS=next_power_of_2(half), HEADS=HEADS,
    )  # fmt: skip
    return by_plain, by_shared
