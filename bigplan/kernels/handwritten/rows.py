"""Tokens copied to the rows of their experts, rows added up by token, and experts' gradients added
to their sums: one pass each.

Plain torch copies the rows that a sum reads into the order of tokens first: for k rows a token it
moves 3 k + 1 hidden states and not k + 1, and as many more where two rows are added before. Sums
are fp32, in the order of a token's choices. It adds all experts' gradients in 16 bits to sums in
fp32, of which each expert has every so manyth row, at half of the memory's rate (Mixtral's on an
H200: 2.2 ms for 1.1; benchmarks/results/2026-11-27-h200-experts).

Any number of rows is one and the same kernel here, also none.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # columns at a time
WARPS = 4


def reference(rows: Tensor, beside: Tensor | None, places: Tensor, tokens: int) -> Tensor:
    """What `combined` gives, in plain torch."""
    both = rows if beside is None else rows + beside
    return both[places.long()].view(tokens, len(places) // tokens, -1).sum(1)


@triton.jit
def _sent(x, order, out, each, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = (tl.load(order + row) // each).to(tl.int64)
    for first in range(0, columns, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        value = tl.load(x + token * columns + offsets, mask=offsets < columns)
        tl.store(out + row * columns + offsets, value, mask=offsets < columns)


@triton.jit
def _combined(
    rows, beside, places, out, columns, EACH: tl.constexpr, BOTH: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, columns, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        inside = offsets < columns
        total = tl.zeros((BLOCK,), tl.float32)
        for number in range(EACH):
            place = tl.load(places + token * EACH + number).to(tl.int64)
            row, here = place * columns, inside & (place >= 0)
            total += tl.load(rows + row + offsets, mask=here, other=0.0).to(tl.float32)
            if BOTH:
                total += tl.load(beside + row + offsets, mask=here, other=0.0).to(tl.float32)
        tl.store(out + token * columns + offsets, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _put(total, part, expert, row, rows, columns, FRESH: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    start = total + (number // rows) * expert + (number % rows) * row
    for first in range(0, columns, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        inside = offsets < columns
        value = tl.load(part + number * columns + offsets, mask=inside)
        value = value.to(total.dtype.element_ty)
        if not FRESH:
            value += tl.load(start + offsets, mask=inside)
        tl.store(start + offsets, value, mask=inside)


def sent(x: Tensor, order: Tensor, each: int) -> Tensor:
    """Row i of the result is token order[i] // each of contiguous x [tokens, h]; order int32."""
    out = x.new_empty(len(order), x.shape[1])
    if len(order):
        _sent[(len(order),)](
            x.contiguous(), order, out, each, x.shape[1], BLOCK=columns_at_once(x), num_warps=WARPS
        )
    return out


def combined(rows: Tensor, beside: Tensor | None, places: Tensor, tokens: int) -> Tensor:
    """For each of so many tokens the sum of its rows of [rows, h] and of those beside: [tokens, h].

    places int32: the rows of the first token, then those of the next, equally many each; those of
    -1 are nowhere.
    """
    out = rows.new_empty(tokens, rows.shape[1])
    if not tokens:
        return out
    _combined[(tokens,)](
        rows, rows if beside is None else beside, places, out, rows.shape[1],
        EACH=len(places) // tokens, BOTH=beside is not None, BLOCK=columns_at_once(rows),
        num_warps=WARPS,
    )  # fmt: skip
    return out


def put(total: Tensor, part: Tensor, *, fresh: bool) -> None:
    """Add contiguous `part` [experts, f, h] to `total`, whose rows are contiguous, or copy it."""
    experts, rows, columns = part.shape
    _put[(experts * rows,)](
        total, part, total.stride(0), total.stride(1), rows, columns,
        FRESH=fresh, BLOCK=columns_at_once(part), num_warps=WARPS,
    )  # fmt: skip


def columns_at_once(x: Tensor) -> int:
    """Of rows [., columns]."""
    wide: int = triton.next_power_of_2(x.shape[-1])
    return min(BLOCK, wide)
