"""RMSNorm over the last dimension: one pass forward, one and a small sum backward.

Plain torch writes fp32 copies of its input: 11 times the bytes of the input forward and 30
backward, against 2 and 3 here. Statistics and arithmetic are fp32. The backward adds what else
comes back to x, as a residual stream's does: a kernel of its own moves 3 times the bytes for that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements a program holds at once: one row of 4096, or 32 heads of 128
WAVES = 4  # programs per multiprocessor in the backward; each keeps a sum of weight gradients


def reference(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The same in plain torch."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


@triton.jit
def _forward(x, weight, out, rstd, rows, width, epsilon, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + epsilon)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    normed = value * scale[:, None] * w[None, :]
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)
    tl.store(rstd + row, scale, mask=row < rows)


@triton.jit
def _backward(
    x, weight, rstd, gradient, beside, by_x, partial, rows, width, steps,
    BESIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    for step in range(steps):
        row = (tl.program_id(0).to(tl.int64) * steps + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)
        normed = value * scale[:, None]
        total += tl.sum(d * normed, 0)
        d = d * w[None, :]
        projection = tl.sum(d * normed, 1) / width
        result = scale[:, None] * (d - normed * projection[:, None])
        if BESIDE:
            result += tl.load(beside + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(by_x + at, result.to(by_x.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * width + column, total, mask=column < width)


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns of a program's tile, powers of two."""
    columns = triton.next_power_of_2(width)
    return max(1, TILE // columns), columns


def _warps(rows: int, columns: int) -> int:
    """16 elements a thread, at most 16 warps."""
    return min(16, max(1, rows * columns // 512))


def forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Normed x in its dtype and 1 / rms, fp32 [..., 1], of contiguous x [..., width]."""
    assert x.is_contiguous()
    width = x.shape[-1]
    count = x.numel() // width
    out = torch.empty_like(x)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    rows, columns = _tile(width)
    _forward[(triton.cdiv(count, rows),)](
        x, weight, out, rstd, count, width, epsilon,
        ROWS=rows, COLUMNS=columns, num_warps=_warps(rows, columns),
    )  # fmt: skip
    return out, rstd


def backward(
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    gradient: Tensor,
    beside: Tensor | None = None,
    *,
    over: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients by x and by the weight (in its dtype, summed in fp32).

    `beside`, like x: the gradient by x of all others that read it, added to the norm's in fp32.
    `over`: the sum of both may take its place.
    """
    gradient = gradient.contiguous()
    others = gradient if beside is None else beside.contiguous()
    width = x.shape[-1]
    count = x.numel() // width
    rows, columns = _tile(width)
    tiles = triton.cdiv(count, rows)
    programs = min(tiles, WAVES * _multiprocessors(x.device))
    steps = triton.cdiv(tiles, programs)
    by_x = others if over and beside is not None else torch.empty_like(x)
    partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        x, weight, rstd, gradient, others, by_x, partial, count, width, steps,
        BESIDE=beside is not None, ROWS=rows, COLUMNS=columns, num_warps=_warps(rows, columns),
    )  # fmt: skip
    return by_x, partial.sum(0).to(weight.dtype)


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count
