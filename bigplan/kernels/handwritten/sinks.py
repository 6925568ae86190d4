"""Sinks counted in attention's result, in place (runtime/attention/sinks.py): one pass.

Plain torch multiplies a result in 16 bits with a number in fp32 for each row element by element, a
sixth of the memory's rate: 0.81 ms of GPT-OSS-20B's 32,768 tokens on an H200, where this kernel
takes 0.20 (benchmarks/results/2026-11-29-h200-whole-adapters).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

HEADS = 16  # of a token, that a program has at a time


@triton.jit
def _count(
    out, sums, sinks, length, heads, columns, COLUMNS: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """Some heads of a token."""
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = head < heads
    at = sums + ((token // length) * heads + head) * length + token % length
    usual = tl.load(at, mask=there, other=0.0)
    sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32)
    most = tl.maximum(usual, sink)
    whole = most + tl.log(tl.exp(usual - most) + tl.exp(sink - most))
    tl.store(at, whole, mask=there)
    rows = out + ((token * heads + head) * columns)[:, None] + i[None, :]
    inside = there[:, None] & (i < columns)[None, :]
    value = tl.load(rows, mask=inside, other=0.0).to(tl.float32) * tl.exp(usual - whole)[:, None]
    tl.store(rows, value.to(out.dtype.element_ty), mask=inside)


def count_(out: Tensor, sums: Tensor, sinks: Tensor) -> None:
    """Count `sinks` [heads] in a result [b, s, heads, d] and in its fp32 sums [b, heads, s].

    All of them are contiguous.
    """
    batch, length, heads, columns = out.shape
    _count[batch * length, triton.cdiv(heads, HEADS)](
        out, sums, sinks, length, heads, columns,
        COLUMNS=next_power_of_2(columns), HEADS=min(HEADS, next_power_of_2(heads)),
    )  # fmt: skip
