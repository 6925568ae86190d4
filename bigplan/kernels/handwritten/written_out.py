"""Numbers that a kernel writes to pinned host memory itself (bigplan/kernels/numbers.py)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # numbers of a program: one has all experts of most models


@triton.jit
def _write_out(numbers, there, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(there + at, tl.load(numbers + at, mask=at < count), mask=at < count)


def write_out(numbers: Tensor, there: Tensor) -> None:
    """Write contiguous `numbers` [n] to `there` [n], of the same dtype, in pinned memory."""
    count = numbers.numel()
    _write_out[(triton.cdiv(count, BLOCK),)](numbers, there, count, BLOCK=BLOCK)
