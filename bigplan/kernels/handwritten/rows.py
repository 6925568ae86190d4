"""Tokens copied to the rows of their experts, rows weighted and added up by token, and experts'
gradients added to their sums: one pass each.

Plain torch copies the rows that a sum reads into the order of tokens first: for k rows a token it
moves 3 k + 1 hidden states and not k + 1, and as many more where two rows are added before. Sums
are fp32, in the order of a token's choices. It adds all experts' gradients in 16 bits to sums in
fp32, of which each expert has every so manyth row, at half of the memory's rate (Mixtral's on an
H200: 2.2 ms for 1.1; benchmarks/results/2026-11-27-h200-experts).

Any number of rows is one and the same kernel here, also none. So it is for weighted activations,
as how many rows come to a rank's experts may be another number every time. Their backward reads
each row once, though it adds it up: nothing else that it gives waits for the sum. That reaches 3.5
to 4.0 TB/s on an H200, kernels generated for one shape 2.6 to 3.4
(benchmarks/results/2026-11-29-h200-wide-experts).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigplan.spec.clamped import ALPHA, LIMIT

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


@triton.jit
def _gates(gate, up, at, inside, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Both factors of an activation x sigmoid(ALPHA x) y, and the sigmoid; of bounded x and y."""
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    if LIMIT is not None:
        x, y = tl.minimum(x, LIMIT), tl.minimum(tl.maximum(y, -LIMIT), LIMIT) + 1.0
    return x, y, tl.sigmoid(ALPHA * x)


@triton.jit
def _weighted(
    gate, up, weights, out, columns, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    for first in range(0, columns, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        at, inside = row * columns + offsets, offsets < columns
        x, y, share = _gates(gate, up, at, inside, ALPHA, LIMIT)
        value = x * share * y * weight
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_backward(
    gate, up, weights, gradient, by_gate, by_up, by_weights, columns,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        at, inside = row * columns + offsets, offsets < columns
        x, y, share = _gates(gate, up, at, inside, ALPHA, LIMIT)
        by_out = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        opened, scaled = x * share, by_out * weight
        total += opened * y * by_out
        by_x = scaled * y * share * (1.0 + ALPHA * x * (1.0 - share))
        by_y = scaled * opened
        if LIMIT is not None:  # beyond its bounds a factor stays what it is
            by_x = tl.where(tl.load(gate + at, mask=inside, other=0.0) > LIMIT, 0.0, by_x)
            by_y = tl.where(tl.abs(tl.load(up + at, mask=inside, other=0.0)) > LIMIT, 0.0, by_y)
        kind = gradient.dtype.element_ty
        tl.store(by_gate + at, by_x.to(kind), mask=inside)
        tl.store(by_up + at, by_y.to(kind), mask=inside)
        tl.store(gradient + at, (opened * y * weight).to(kind), mask=inside)
    tl.store(by_weights + row, tl.sum(total, 0))


def weighted(gate: Tensor, up: Tensor, weights: Tensor, *, clamped: bool = False) -> Tensor:
    """SwiGLU of contiguous rows [rows, f] times a weight each, fp32 [rows].

    `clamped`: as GPT-OSS has it (runtime/experts/clamped.py).
    """
    out, (alpha, limit) = torch.empty_like(gate), _bounds(clamped=clamped)
    if len(gate):
        _weighted[(len(gate),)](
            gate, up, weights, out, gate.shape[1], ALPHA=alpha, LIMIT=limit,
            BLOCK=_block(gate), num_warps=WARPS,
        )  # fmt: skip
    return out


def weighted_backward(
    gate: Tensor, up: Tensor, weights: Tensor, gradient: Tensor, *, clamped: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by gate, up and weights; what `weighted` gives goes to `gradient`. Contiguous."""
    found = torch.empty_like(gate), torch.empty_like(up), torch.empty_like(weights)
    alpha, limit = _bounds(clamped=clamped)
    if len(gate):
        _weighted_backward[(len(gate),)](
            gate, up, weights, gradient, *found, gate.shape[1], ALPHA=alpha, LIMIT=limit,
            BLOCK=_block(gate), num_warps=WARPS,
        )  # fmt: skip
    return found


def _bounds(*, clamped: bool) -> tuple[float, float | None]:
    """What a sigmoid multiplies the gate by, and how far gate and up go."""
    return (ALPHA, LIMIT) if clamped else (1.0, None)


def sent(x: Tensor, order: Tensor, each: int) -> Tensor:
    """Row i of the result is token order[i] // each of contiguous x [tokens, h]; order int32."""
    out = x.new_empty(len(order), x.shape[1])
    if len(order):
        _sent[(len(order),)](
            x.contiguous(), order, out, each, x.shape[1], BLOCK=_block(x), num_warps=WARPS
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
        EACH=len(places) // tokens, BOTH=beside is not None, BLOCK=_block(rows), num_warps=WARPS,
    )  # fmt: skip
    return out


def put(total: Tensor, part: Tensor, *, fresh: bool) -> None:
    """Add contiguous `part` [experts, f, h] to `total`, whose rows are contiguous, or copy it."""
    experts, rows, columns = part.shape
    _put[(experts * rows,)](
        total, part, total.stride(0), total.stride(1), rows, columns,
        FRESH=fresh, BLOCK=_block(part), num_warps=WARPS,
    )  # fmt: skip


def _block(x: Tensor) -> int:
    wide: int = triton.next_power_of_2(x.shape[-1])
    return min(BLOCK, wide)
