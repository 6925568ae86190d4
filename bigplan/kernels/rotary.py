"""Rotary positions: turns the pairs (i, i + r/2) of every head's first r columns in one pass.

Plain torch makes four products, two sums and a concatenation: 11 times the bytes of its input,
against 2 here. The backward is the same kernel with the angle's sign changed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # pairs a program


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in plain torch."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@triton.jit
def _rotate(
    x, cos, sin, out, rows, heads, length, half, width, row_stride, sign,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # of [b, s, heads]
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < half)[None, :]
    token, head = row // heads, row % heads
    source = (token * row_stride + head * width)[:, None] + column[None, :]
    angle = (token % length)[:, None] * half + column[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32) * sign
    first = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + source + half, mask=inside, other=0.0).to(tl.float32)
    target = row[:, None] * width + column[None, :]
    tl.store(out + target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + target + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)
    if REST:  # columns that stay
        column = 2 * half + tl.arange(0, REST)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        source = (token * row_stride + head * width)[:, None] + column[None, :]
        kept = tl.load(x + source, mask=inside, other=0.0)
        tl.store(out + row[:, None] * width + column[None, :], kept, mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Heads x [b, s, heads, d] turned by the angles of cos and sin [s, r / 2], or `back`.

    Columns from r on stay as they are. Heads lie side by side in x (any stride between tokens); the
    result is contiguous.
    """
    batch, length, heads, width = x.shape
    if x.stride()[2:] != (width, 1) or x.stride(0) != length * x.stride(1):
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half, rows = cos.shape[-1], batch * length * heads
    columns, rest = triton.next_power_of_2(half), width - 2 * half
    each = max(1, TILE // columns)
    _rotate[(triton.cdiv(rows, each),)](
        x, cos, sin, out, rows, heads, length, half, width, x.stride(1), -1.0 if back else 1.0,
        ROWS=each, COLUMNS=columns, REST=triton.next_power_of_2(rest) if rest else 0,
    )  # fmt: skip
    return out
