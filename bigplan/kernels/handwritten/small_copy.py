"""A copy by a kernel, to or from page-locked host memory (bigplan/kernels/numbers.py)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # numbers of a program: most models have no more experts, whose rows it copies


@triton.jit
def _copy(numbers, there, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(there + at, tl.load(numbers + at, mask=at < count), mask=at < count)


def small_copy(numbers: Tensor, there: Tensor) -> None:
    """Copy contiguous `numbers` to `there`, of the same size and dtype.

    Either may lie in page-locked host memory, which the GPU reads and writes across PCIe.
    """
    count = numbers.numel()
    _copy[(triton.cdiv(count, BLOCK),)](numbers, there, count, BLOCK=BLOCK)
