"""Seconds of one fused memory-bound kernel, from what it moves and computes and how it is tiled.

Five times are estimated apart: device memory, L2, shared memory and issue of the multiprocessors,
and latency, which is how long resident programs take one wave after another when nothing but their
own loads, reductions and arithmetic holds them up. The longest hides most of the others:

    seconds = (memory^p + l2^p + issue^p + latency^p)^(1/p) + start of the kernel

Latency is where the tile matters. A program's loads are under way for `memory_latency` times
LOADED, its reductions exchange values through shared memory, and only so many programs reside as
their registers, threads and shared memory allow (Little's law: bytes in flight are the bandwidth
times the latency). The last wave counts as a whole one: its programs take as long as others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil, log2

from bigplan.spec.cluster import Gpu
from bigplan.spec.multiprocessor import Multiprocessor

WARP = 32  # threads
# Of a load while the memory is busy, over one on an idle GPU; and how sharply the longest time
# hides the others. Both are fitted, together, to all nine committed measurements of hand-written
# kernels on H200s (tests/cost/test_kernel.py); nothing is fitted to one kernel or one shape.
LOADED, POWER = 4.0, 4.0
# Registers of a thread beside its elements: addresses, masks, loop counters; of strips and others.
# Set, with what KernelWork counts, to 73 generated kernels that ptxas compiled for compute
# capability 9.0: strips are met to 10% but for a few, others to 30%, and none of the 73 spilled.
STRIP_REGISTERS, BASE_REGISTERS = 24, 16
MOST_REGISTERS = 255  # of a thread, from Volta on
REGISTER_UNIT = 8  # they are given out to a warp by so many a thread
STEPS_IN_WARP = 5  # exchanges that reduce 32 lanes


class Shape(StrEnum):
    """How the programs of a kernel cover rows and columns."""

    FLAT = "pointwise"  # tiles of rows x columns, each program one of them
    ROW = "row reduction"  # a program holds whole rows
    LOOPED = "row reduction in passes"  # a program reads its rows as often as it needs
    STRIP = "row and column reduction"  # a program walks down its rows and adds columns up


@dataclass(frozen=True, slots=True)
class Tile:
    """Parameters of a kernel: powers of two but for the number of programs of a strip."""

    shape: Shape
    rows: int
    columns: int
    warps: int
    programs: int = 0  # strips only: how many share out the rows


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What a fused kernel does to a domain of rows x width positions."""

    rows: int
    width: int
    read: float  # bytes of device memory, every tensor once
    written: float
    lane_operations: float  # a position: on fp32 lanes
    special: float  # a position: exponentials, roots, reciprocals
    live: float  # values of a position that are held at once, in 32-bit registers, in a strip
    packed: float  # of them what is loaded, in its own dtype: all that other kernels hold
    levels: int = 0  # row reductions of which each needs the one before
    column_sums: int = 0
    values_a_program: float = 0.0  # bytes that each program reads besides, such as a weight's row
    read_each_pass: float = 0.0  # bytes that every pass of LOOPED reads


class KernelBound(StrEnum):
    """What a kernel waits for most."""

    MEMORY = "device memory"
    L2 = "L2 cache"
    ISSUE = "arithmetic"
    LATENCY = "latency"
    LAUNCH = "launch"


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A prediction: seconds, its parts, and how full the GPU is."""

    seconds: float
    memory: float
    l2: float
    issue: float
    latency: float
    start: float
    resident: int  # programs on a multiprocessor
    waves: float  # of resident programs, the last one in part
    registers: int  # of a thread

    @property
    def bound(self) -> KernelBound:
        """The longest of its parts."""
        parts = {
            KernelBound.MEMORY: self.memory,
            KernelBound.L2: self.l2,
            KernelBound.ISSUE: self.issue,
            KernelBound.LATENCY: self.latency,
            KernelBound.LAUNCH: self.start,
        }
        return max(parts, key=lambda bound: parts[bound])


def registers(work: KernelWork, tile: Tile) -> int:
    """32-bit registers of a thread; above MOST_REGISTERS, or the GPU's share, it spills."""
    elements = tile.rows * tile.columns / (WARP * tile.warps)
    if tile.shape is Shape.STRIP:
        needed = STRIP_REGISTERS + ceil(elements * work.live)
    else:  # the compiler takes a few elements at a time through all operations
        needed = BASE_REGISTERS + ceil(elements * (work.packed + (tile.shape is Shape.LOOPED)))
    return -(-needed // REGISTER_UNIT) * REGISTER_UNIT


def resident(work: KernelWork, tile: Tile, sm: Multiprocessor) -> int:
    """Programs that a multiprocessor holds at once; 0 where one does not fit or would spill."""
    threads, each = WARP * tile.warps, registers(work, tile)
    if each > MOST_REGISTERS:
        return 0
    limits = [sm.programs, sm.threads // threads, sm.registers // (each * threads)]
    scratch = shared_bytes(work, tile)
    if scratch:
        limits.append(sm.shared_memory // scratch)
    return min(limits)


def shared_bytes(work: KernelWork, tile: Tile) -> int:
    """Shared memory of a program: each warp leaves its part of a row's sum, or of a column's."""
    rows = 4 * tile.rows * tile.warps if work.levels else 0
    columns = 4 * tile.columns * tile.warps if work.column_sums and tile.rows > 1 else 0
    return max(rows, columns)


def grid(work: KernelWork, tile: Tile) -> int:
    """Programs of the kernel."""
    across = ceil(work.width / tile.columns)
    if tile.shape is Shape.STRIP:
        return tile.programs * across
    down = ceil(work.rows / tile.rows)
    return down * (across if tile.shape is Shape.FLAT else 1)


def _turns(work: KernelWork, tile: Tile) -> tuple[int, int]:
    """Tiles that a program takes one after another, and passes over its rows."""
    if tile.shape is Shape.STRIP:
        return ceil(ceil(work.rows / tile.rows) / tile.programs), 1
    if tile.shape is Shape.LOOPED:
        passes = work.levels + 1
        return passes * ceil(work.width / tile.columns), passes
    return 1, 1


def kernel_seconds(work: KernelWork, tile: Tile, gpu: Gpu, sm: Multiprocessor) -> KernelTime | None:
    """The prediction; None where a program with this tile does not fit without spilling."""
    fits = resident(work, tile, sm)
    if not fits:
        return None
    programs, (turns, passes) = grid(work, tile), _turns(work, tile)
    each = tile.rows * tile.columns
    waves = programs / (fits * gpu.multiprocessors)
    again = work.read_each_pass * (passes - 1)
    beside = work.values_a_program * programs * (turns if tile.shape is Shape.LOOPED else 1)
    cached = min(1.0, sm.l2_memory / max(1.0, _held_again(work, tile, fits, gpu)))
    sums = 2.0 * 4 * work.column_sums * work.width * tile.programs  # written, and read to be added
    memory = (work.read + work.written + sums + again * (1 - cached)) / (
        gpu.memory_bandwidth * gpu.memory_efficiency
    )
    l2_rate = min(sm.l2_bandwidth, sm.load_bytes * sm.clock * gpu.multiprocessors)
    l2 = (work.read + work.written + again + beside) / l2_rate
    slots = work.lane_operations + work.special * sm.lanes / sm.special
    # Passes share out the operations, but each loads again.
    cycles = each * turns / passes * (slots + passes - 1) / sm.lanes
    issue = cycles * programs / gpu.multiprocessors / sm.clock
    turn = LOADED * sm.memory_latency + _exchange(work, tile, sm) / passes
    latency = ceil(waves) * (turns * turn + cycles / sm.clock + _closing(work, tile, sm))
    overlapped = sum(part**POWER for part in (memory, l2, issue, latency)) ** (1 / POWER)
    return KernelTime(
        overlapped + sm.kernel_start,
        memory,
        l2,
        issue,
        latency,
        sm.kernel_start,
        fits,
        waves,
        registers(work, tile),
    )


def _held_again(work: KernelWork, tile: Tile, fits: int, gpu: Gpu) -> float:
    """Bytes of the rows that all resident programs read in passes."""
    rows = min(work.rows, tile.rows * fits * gpu.multiprocessors)
    return work.read_each_pass * rows / work.rows


def _exchange(work: KernelWork, tile: Tile, sm: Multiprocessor) -> float:
    """Seconds of a turn's row reductions: lanes of a warp, then warps through shared memory."""
    across = min(tile.warps, max(1, tile.columns // (4 * WARP)))  # warps that share a row
    steps = STEPS_IN_WARP + (2 + log2(across) if across > 1 else 0)
    return work.levels * steps * sm.shared_latency


def _closing(work: KernelWork, tile: Tile, sm: Multiprocessor) -> float:
    """Seconds at a strip's end: the rows of its tile are added up, one exchange of all warps."""
    if not work.column_sums or tile.rows == 1:
        return 0.0
    return work.column_sums * (STEPS_IN_WARP + 2) * sm.shared_latency


def best_tiles(
    work: KernelWork, tiles: list[Tile], gpu: Gpu, sm: Multiprocessor
) -> list[tuple[Tile, KernelTime]]:
    """Those that fit, fastest first; of equal ones the smaller."""
    timed = [(tile, kernel_seconds(work, tile, gpu, sm)) for tile in tiles]
    fitting = [(tile, time) for tile, time in timed if time is not None]
    return sorted(
        fitting, key=lambda pair: (pair[1].seconds, pair[0].rows * pair[0].columns, pair[0].warps)
    )
