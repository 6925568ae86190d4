"""Seconds of one fused memory-bound kernel, from what it moves and computes and how it is tiled.

Six times are estimated separately. Four are device memory, L2, L1 and the issue of arithmetic, each
as if nothing else held the kernel up. The fifth is the start of its programs, of which the GPU
begins about one a cycle. The sixth is the chain: the resident programs, one wave after another. A
program waits for its loads, computes its tile, and exchanges what it reduces, in turn. It does not
wait for what it stores. The longest time hides most of the others:

    seconds = (memory^p + l2^p + l1^p + issue^p + starts^p + chain^p)^(1/p) + start of the kernel

The tile matters for the chain. Many small programs overlap each other's loads and arithmetic. Few
large programs do not, because their warps wait for each other. Registers, threads and shared memory
limit the number of resident programs. The last wave counts as a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil, log2

from bigplan.spec.gpu import Gpu
from bigplan.spec.multiprocessor import Multiprocessor

WARP = 32  # threads
STARTED = 1.0  # programs that a GPU begins in a cycle (measured on an H200: 0.60 ns each)
# How long a load takes over the latency of an idle GPU, and how sharply the longest time hides the
# others. Both are fitted together to the sweeps of an H200 (benchmarks/kernel_model.py), without
# the cases set aside. Nothing is fitted to one kernel or one shape.
LOADED, POWER = 1.4, 4.0
# Registers of a thread: BASE_REGISTERS hold addresses, masks and loop counters. Outside of strips
# an element takes HELD, or PACKED of its loaded values, because the compiler takes a few elements
# at a time through all operations. The three are set to 110 generated kernels that ptxas compiled
# for compute capability 9.0. Most of them are met within a quarter.
BASE_REGISTERS, HELD, PACKED = 20, 1.25, 0.7
MOST_REGISTERS = 255  # of a thread, from Volta on
REGISTER_UNIT = 8  # registers a thread, by which a warp gets them
# Instructions of a thread besides, for its place, addresses and masks. Kernels without rows have 12
# to 20 when compiled for compute capability 9.0, kernels whose rows have dimensions up to 60.
A_THREAD = 20
STEPS_IN_WARP = 5  # exchanges that reduce 32 lanes
STEPS_ACROSS = 6  # two accesses to shared memory, a barrier, and back


class Shape(StrEnum):
    """How the programs of a kernel cover rows and columns."""

    FLAT = "pointwise"  # each program has one tile of rows x columns
    ROW = "row reduction"  # a program holds whole rows
    LOOPED = "row reduction in passes"  # a program reads its rows as often as it needs
    STRIP = "row and column reduction"  # a program walks down its rows and adds columns up
    TWICE = "row and column reduction in passes"  # it reads each row again once the row is reduced


@dataclass(frozen=True, slots=True)
class Tile:
    """Parameters of a kernel: powers of two but for the number of programs of a strip."""

    shape: Shape
    rows: int
    columns: int
    warps: int
    programs: int = 0  # strips only: how many share out the rows
    stages: int = 1  # strips only: tiles in flight or at work; all but one are fetched

    @property
    def strip(self) -> bool:
        """Whether a program walks down rows and adds up columns."""
        return self.shape in (Shape.STRIP, Shape.TWICE)


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
    packed: float  # loaded values in their dtype, which is all that other shapes hold
    levels: int = 0  # row reductions in a chain: each needs the one before
    reductions: int = 0  # all row reductions
    fetched: float = 0.0  # bytes of a position that are loaded
    column_sums: int = 0
    values_a_program: float = 0.0  # bytes that each program reads besides, such as a weight's row
    read_each_pass: float = 0.0  # bytes that every pass of LOOPED or TWICE reads
    steady: float = 0.0  # of `live`, what stays from row to row: sums, and a column's values


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
    match tile.shape:
        case Shape.STRIP:
            each = work.live
        case Shape.TWICE:  # only these outlive a row; the rest passes through, as elsewhere
            each = work.steady + PACKED
        case _:
            each = max(HELD, PACKED * work.packed)
    needed = BASE_REGISTERS + ceil(elements * each)
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
    ahead = ceil(tile.rows * tile.columns * work.fetched) * (tile.stages - 1)
    if tile.shape is Shape.TWICE:  # every pass fetches its own
        ahead *= work.levels + 1
    return max(rows, columns) + ahead


def grid(work: KernelWork, tile: Tile) -> int:
    """Programs of the kernel."""
    across = ceil(work.width / tile.columns)
    if tile.strip:
        return tile.programs * across
    down = ceil(work.rows / tile.rows)
    return down * (across if tile.shape is Shape.FLAT else 1)


def _turns(work: KernelWork, tile: Tile) -> tuple[int, int]:
    """Tiles that a program takes one after another, and passes over its rows."""
    if tile.strip:
        passes = work.levels + 1 if tile.shape is Shape.TWICE else 1
        return ceil(ceil(work.rows / tile.rows) / tile.programs), passes
    if tile.shape is Shape.LOOPED:
        passes = work.levels + 1
        return passes * ceil(work.width / tile.columns), passes
    return 1, 1


def kernel_seconds(work: KernelWork, tile: Tile, gpu: Gpu, sm: Multiprocessor) -> KernelTime | None:
    """The prediction; None if a program with this tile does not fit without spilling."""
    fits = resident(work, tile, sm)
    if not fits:
        return None
    programs, (turns, passes) = grid(work, tile), _turns(work, tile)
    multiprocessors = gpu.multiprocessors
    bandwidth = gpu.memory_bandwidth * gpu.memory_efficiency
    waves = programs / (fits * multiprocessors)
    again = work.read_each_pass * (passes - 1)
    # Either half of an L2 keeps what its own multiprocessors read.
    cached = min(1.0, sm.l2_memory / 2 / max(1.0, _held_again(work, tile, fits, gpu, passes)))
    sums = 2.0 * 4 * work.column_sums * work.width * tile.programs  # written, and read to be added
    moved = work.read + work.written + sums + again * (1 - cached)
    memory = moved / bandwidth
    l2 = (work.read + work.written + again) / sm.l2_bandwidth
    # The programs of a multiprocessor share in its L1 what every program reads besides.
    l1_rate = sm.load_bytes * sm.clock * multiprocessors
    l1 = (work.read + again + work.values_a_program * programs) / l1_rate
    # Lanes go on while the special function units work; both begin in the same slots.
    slots = max(work.lane_operations + work.special, work.special * sm.lanes / sm.special)
    # Lane operations of one turn: several passes share the arithmetic, but each pass loads again.
    # A turn of LOOPED is one pass over a tile, a turn of TWICE all passes.
    looped = tile.shape is Shape.LOOPED
    tile_slots = tile.rows * tile.columns * (slots + passes - 1) / (passes if looped else 1)
    tile_slots += A_THREAD * WARP * tile.warps
    issue = tile_slots * turns * programs / sm.lanes / multiprocessors / sm.clock
    starts = programs / (STARTED * sm.clock)
    turn = _turn(work, tile, sm, tile_slots, work.read * multiprocessors / bandwidth / programs)
    chain = ceil(waves) * (turns * turn + _closing(work, tile, sm))
    parts = (memory, l2, l1, issue, starts, chain)
    overlapped = sum(part**POWER for part in parts) ** (1 / POWER)
    return KernelTime(
        overlapped + sm.kernel_start,
        memory,
        max(l2, l1),
        issue,
        max(chain, starts),
        sm.kernel_start,
        fits,
        waves,
        registers(work, tile),
    )


def _turn(work: KernelWork, tile: Tile, sm: Multiprocessor, slots: float, transfer: float) -> float:
    """Seconds of a program's turn: `slots` lane operations, and its part of `transfer`, its loads.

    Nothing waits for stores. Fetches ahead of all passes leave together. A row in passes has no
    barrier until a pass ends, so some warps work while others wait.
    """
    (turns, passes), looped = _turns(work, tile), tile.shape is Shape.LOOPED
    waits = passes if tile.stages == 1 and not looped else 1
    load = transfer / turns + LOADED * sm.memory_latency * waits
    alone = WARP * min(tile.warps, sm.lanes // WARP)  # lanes that a program alone can use
    exchange = _exchange(work, tile, sm) / (turns if looped else 1)
    work_on = slots / alone / sm.clock + exchange
    if tile.stages > 1:
        return max(load / (tile.stages - 1), work_on)
    return max(load, work_on) if looped else load + work_on


def _held_again(work: KernelWork, tile: Tile, fits: int, gpu: Gpu, passes: int) -> float:
    """Bytes that all resident programs touch during one pass: their rows, and what they write.

    So much comes between two reads of one place. One program in `passes` is at its last, which
    writes.
    """
    rows = min(work.rows, tile.rows * fits * gpu.multiprocessors)
    return (work.read_each_pass + work.written / passes) * rows / work.rows


def _exchange(work: KernelWork, tile: Tile, sm: Multiprocessor) -> float:
    """Seconds of a tile's row reductions: lanes of a warp, then warps through shared memory."""
    across = min(tile.warps, max(1, tile.columns // (4 * WARP)))  # warps that share a row
    steps = STEPS_IN_WARP + (STEPS_ACROSS + log2(across) if across > 1 else 0)
    return work.reductions * steps * sm.shared_latency


def _closing(work: KernelWork, tile: Tile, sm: Multiprocessor) -> float:
    """Seconds at a strip's end: the rows of its tile are added up, one exchange of all warps."""
    if not work.column_sums or tile.rows == 1:
        return 0.0
    return work.column_sums * (STEPS_IN_WARP + 2) * sm.shared_latency


def best_tiles(
    work: KernelWork, tiles: list[Tile], gpu: Gpu, sm: Multiprocessor
) -> list[tuple[Tile, KernelTime]]:
    """The tiles that fit, fastest first with their last wave; among equally fast ones the smaller.

    Strips that read each row twice come after all that read it once. A few registers more than
    counted leave half as many of them resident: layer norm's backward of 5,120 columns took 440 us
    on an H100 where 293 were predicted, and 303 by a strip that reads once.
    """
    timed = [(tile, kernel_seconds(work, tile, gpu, sm)) for tile in tiles]
    fitting = [(tile, time) for tile, time in timed if time is not None]
    return sorted(fitting, key=_rank)


def _rank(pair: tuple[Tile, KernelTime]) -> tuple[bool, float, int, int]:
    tile, time = pair
    # In the last wave nobody takes the place of a program that ends, so the GPU is half full on
    # average. The rate of a copy has a last wave in it, so this ranks tiles and is in no price.
    last = 0.0 if tile.strip else time.memory / max(1.0, time.waves)
    return (
        tile.shape is Shape.TWICE,
        time.seconds + last / 2,
        tile.rows * tile.columns,
        tile.warps,
    )
