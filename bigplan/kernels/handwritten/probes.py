"""Kernels that wait for one thing each, for `bigplan profile --multiprocessors`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chase(table, place, steps):
    """Follow a table of places from the one that the last chain came to: each load waits."""
    at = tl.load(place)
    for _ in range(steps):
        at = tl.load(table + at)
    tl.store(place, at)


@triton.jit
def exchange(out, steps, COLUMNS: tl.constexpr):
    """Sums over all lanes of a program, each of the one before."""
    x = tl.arange(0, COLUMNS).to(tl.float32)
    for _ in range(steps):
        x = x * 0.5 + tl.sum(x, 0) * 0.001
    tl.store(out + tl.arange(0, COLUMNS), x)


@triton.jit
def read(table, out, count, turns, BLOCK: tl.constexpr):
    """Read blocks of a buffer again and again, past the cache of the multiprocessor.

    `count`, a power of two, is a multiple of BLOCK: only the block's place takes arithmetic.
    """
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in range(turns):
        start = ((tl.program_id(0) + turn * tl.num_programs(0)) * BLOCK) & (count - 1)
        total += tl.load(table + tl.multiple_of(start, 16) + lane, cache_modifier=".cg")
    tl.store(out + tl.program_id(0) * BLOCK + lane, total)


@triton.jit
def powers(out, clocks, steps, BLOCK: tl.constexpr):
    """Exponentials, eight chains of a thread; cycles and nanoseconds that they take."""
    x = tl.arange(0, BLOCK).to(tl.float32) * 0.0001
    cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], tl.int64, False, 1)
    began = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)
    for _ in range(steps):
        x = tl.exp2(x - 1.0)
    after = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], tl.int64, False, 1)
    ended = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)
    tl.store(out + tl.arange(0, BLOCK), x)
    tl.store(clocks, after - cycles)
    tl.store(clocks + 1, ended - began)


@triton.jit
def nothing(out):
    """A kernel that starts and ends."""
    tl.store(out + tl.program_id(0), 0.0)
