"""AdamW on moments in bf16 or 8 bits: decoded, updated and encoded in one pass, written by hand.

With a 16-bit copy it moves 22 bytes a parameter in bf16 and 18 in 8 bits, where fp32 moves 30.
spec/moments.py has the format, runtime/optimizer/narrow_adamw.py the same in plain torch. A block's
scale is the largest of its new values, so a program has whole blocks of elements that are stored
together. Tensors with constants of their own are runs of these: a program takes those that it meets
in turn.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.kernels.handwritten.hashing import mixed
from bigplan.spec.moments import BLOCK, FIRST_BITS, SECOND_BITS, blocks, levels

ROWS, WARPS = 4, 4  # blocks of a program, and its warps
FACTORS = 9  # of a run: adamw.py's constants, the update's number, the divisor


@triton.jit
def _drawn(parameter, gradient, step):
    word = parameter.to(tl.uint32, bitcast=True) * tl.full((), 0x9E3779B1, tl.uint32)
    word += gradient.to(tl.uint32, bitcast=True) * tl.full((), 0x85EBCA77, tl.uint32)
    word += step.to(tl.uint32) * tl.full((), 0xC2B2AE3D, tl.uint32)
    return mixed(word)


@triton.jit
def _level(value, back, BITS: tl.constexpr):
    """The number of the level to which values up to 1 are rounded: to nearest for `back` 1."""
    width = tl.full(value.shape, 2.0 ** (BITS - 1), tl.float32)
    for _ in tl.static_range(BITS - 2):
        low = value < 0.1
        value = tl.where(low, value * 10.0, value)
        width = tl.where(low, width * 0.5, width)
    place = (value - 0.1) * (1 / 0.9) * width + (width - back)
    place = tl.minimum(tl.maximum(place, 0.0), 2.0**BITS - 2.0)
    return place.to(tl.int32)


@triton.jit
def _first_codes(value, scale, BITS: tl.constexpr):
    parts = tl.div_rn(tl.abs(value), tl.where(scale > 0.0, scale, 1.0))
    code = _level(parts, 1.0, BITS)
    code = tl.where(parts >= 1.0 - 0.225 / 2 ** (BITS - 1), 2**BITS - 1, code)
    return tl.where(value < 0.0, -code, code).to(tl.int8)


@triton.jit
def _second_codes(root, scale, words, table, BITS: tl.constexpr):
    parts = tl.div_rn(root, tl.where(scale > 0.0, scale, 1.0))
    below = _level(parts, 1.5, BITS)
    low, high = tl.load(table + below), tl.load(table + below + 1)
    chance = (words >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216)
    up = chance * (high * high - low * low) < parts * parts - low * low
    up |= (below == 0) & (parts > 0.0)
    return (below + up.to(tl.int32)).to(tl.uint8)


@triton.jit
def _upper(bits):
    """The bf16 that the upper half of fp32's bits is; Triton's interpreter rounds no other way."""
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _adamw(
    p, g, m, v, m_scales, v_scales, copy, m_table, v_table, starts, factors, runs, count,
    CODED: tl.constexpr, COPY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FACTORS: tl.constexpr, FIRST_BITS: tl.constexpr, SECOND_BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < count
    old = tl.load(p + at, mask=inside, other=0.0)
    gradient = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.div_rn(gradient, tl.load(factors + 8))
    first, second = tl.load(m + at, mask=inside, other=0), tl.load(v + at, mask=inside, other=0)
    if CODED:
        known = row * BLOCK < count
        m_scale = tl.load(m_scales + row, mask=known, other=0.0)[:, None]
        v_scale = tl.load(v_scales + row, mask=known, other=0.0)[:, None]
        code = first.to(tl.int32)
        first = tl.load(m_table + tl.abs(code)) * m_scale
        first = tl.where(code < 0, -first, first)
        root = tl.load(v_table + second.to(tl.int32)) * v_scale
        second = root * root
    else:
        first, second = first.to(tl.float32), second.to(tl.float32)
    words = _drawn(old, gradient, tl.load(factors + 7))
    first = first + tl.load(factors + 1) * (gradient - first)
    square = gradient * gradient * tl.load(factors + 3)
    second = second * tl.load(factors + 2) + square
    root = tl.sqrt_rn(second)
    change = tl.div_rn(first, tl.div_rn(root, tl.load(factors + 4)) + tl.load(factors + 5))

    # The last run that begins at or before an element is its own.
    begin = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK)
    number = 0
    while (number + 1 < runs) & (
        tl.load(starts + number + 1, mask=number + 1 < runs, other=0) <= begin
    ):
        number += 1
    decay = tl.zeros((ROWS, BLOCK), tl.float32) + tl.load(factors + number * FACTORS)
    rate = tl.zeros((ROWS, BLOCK), tl.float32) + tl.load(factors + number * FACTORS + 6)
    number += 1
    while (number < runs) & (
        tl.load(starts + number, mask=number < runs, other=0) < begin + ROWS * BLOCK
    ):
        mine = at >= tl.load(starts + number)
        decay = tl.where(mine, tl.load(factors + number * FACTORS), decay)
        rate = tl.where(mine, tl.load(factors + number * FACTORS + 6), rate)
        number += 1
    new = old * decay + change * rate
    tl.store(p + at, new, mask=inside)
    if COPY:
        tl.store(copy + at, new.to(copy.dtype.element_ty), mask=inside)

    if CODED:
        m_scale = tl.max(tl.where(inside, tl.abs(first), 0.0), 1)
        v_scale = tl.max(tl.where(inside, root, 0.0), 1)
        tl.store(m_scales + row, m_scale, mask=known)
        tl.store(v_scales + row, v_scale, mask=known)
        tl.store(m + at, _first_codes(first, m_scale[:, None], FIRST_BITS), mask=inside)
        codes = _second_codes(root, v_scale[:, None], words, v_table, SECOND_BITS)
        tl.store(v + at, codes, mask=inside)
    else:
        bits = first.to(tl.uint32, bitcast=True)
        tl.store(m + at, _upper(bits + 0x7FFF + ((bits >> 16) & 1)), mask=inside)
        bits = second.to(tl.uint32, bitcast=True)
        tl.store(v + at, _upper(bits + (words & 0xFFFF)), mask=inside)


@cache
def _table(bits: int, device: torch.device) -> Tensor:
    return torch.tensor(levels(bits), device=device)


def step(
    pair: tuple[Tensor, Tensor],
    moments: tuple[Tensor, ...],
    scales: tuple[Tensor, ...],
    copy: Tensor | None,
    runs: tuple[Tensor, Tensor],
) -> None:
    """Update contiguous fp32 parameters [n] and moments in place, and write `copy`, if any.

    `pair`: parameters, and gradients of any dtype; `scales`: fp32 [blocks], of 8 bits alone;
    `runs`: their first elements, int64, and their factors, fp32 [runs, FACTORS].
    """
    (parameter, gradient), (first, second) = pair, moments
    count, (starts, factors) = parameter.numel(), runs
    m_scales, v_scales = scales or (factors, factors)
    tables = (_table(bits, parameter.device) for bits in (FIRST_BITS, SECOND_BITS))
    _adamw[(triton.cdiv(blocks(count), ROWS),)](
        parameter, gradient, first, second, m_scales, v_scales,
        parameter if copy is None else copy, *tables, starts, factors, len(starts), count,
        CODED=bool(scales), COPY=copy is not None, ROWS=ROWS, BLOCK=BLOCK, FACTORS=FACTORS,
        FIRST_BITS=FIRST_BITS, SECOND_BITS=SECOND_BITS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
