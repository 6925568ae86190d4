"""The model of fused kernels beside what was measured, and what must hold on every GPU."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from bigplan.cost.kernel import KernelWork, Shape, Tile, best_tiles, grid, kernel_seconds, resident
from bigplan.spec.gpu import find_gpu
from bigplan.spec.multiprocessor import find_multiprocessor, list_multiprocessors, named_as

COPY = 4.242e12  # bytes/s of a device copy in the run of benchmarks/results/2026-11-21-h200-kernels


def _norm(rows: int, width: int, *, back: bool) -> KernelWork:
    each = rows * width * 2.0
    if back:
        return KernelWork(rows, width, 2 * each, each, 14, 0, 5, 1, 1, 1, 4, 1, width * 2.0)
    return KernelWork(rows, width, each, each, 6, 0, 2.5, 0.5, 1, 1, 2, 0, width * 2.0)


TOKENS, GATED, HEADS = 32768, 32768 * 14336, 32768 * 32
WIDE, NARROW = (1, 4096, 8), (32, 128, 8)  # the tiles of bigplan/kernels/rms_norm.py
# Name, work, tile as it ran, measured seconds. The last column is what a second kernel takes that
# adds up the backward's partial sums: its bytes and a start.
MEASURED = (
    ("norm 4096", _norm(TOKENS, 4096, back=False), Tile(Shape.ROW, *WIDE), 136e-6, 0),
    ("norm 4096 back", _norm(TOKENS, 4096, back=True), Tile(Shape.STRIP, *WIDE, 528), 275e-6, 5e-6),
    ("norm 128", _norm(2**20, 128, back=False), Tile(Shape.ROW, *NARROW), 136e-6, 0),
    ("swiglu", KernelWork(1, GATED, 4.0 * GATED, 2.0 * GATED, 8, 2, 4, 1),
     Tile(Shape.FLAT, 1, 1024, 4), 644e-6, 0),
    ("swiglu back", KernelWork(1, GATED, 6.0 * GATED, 4.0 * GATED, 14, 2, 6, 1.5),
     Tile(Shape.FLAT, 1, 1024, 4), 1089e-6, 0),
    ("rotary", KernelWork(HEADS, 64, 256.0 * HEADS, 256.0 * HEADS, 8, 0, 6, 2),
     Tile(Shape.FLAT, 32, 64, 4), 138e-6, 0),
)  # fmt: skip
GPU, SM = find_gpu("h200-sxm"), find_multiprocessor("h200-sxm")


def test_it_meets_the_measured_kernels_of_an_h200() -> None:
    """Six of nine; docs/kernels.md names the others: backwards of short or narrow rows."""
    errors = []
    for _, work, tile, measured, beside in MEASURED:
        time = kernel_seconds(work, tile, GPU, SM)
        assert time is not None
        errors.append(abs((time.seconds + beside) / measured - 1))
    assert median(errors) < 0.06
    assert max(errors) < 0.25


@pytest.mark.parametrize("name", list_multiprocessors())
def test_every_description_agrees_with_its_gpu(name: str) -> None:
    gpu, sm = find_gpu(name), find_multiprocessor(name)
    peak = 2 * sm.lanes * sm.clock * gpu.multiprocessors
    assert peak == pytest.approx(gpu.peak_flops["fp32"], rel=0.02)
    assert sm.l2_bandwidth > gpu.memory_bandwidth
    assert named_as(gpu.name) == name


@pytest.mark.parametrize("name", list_multiprocessors())
def test_no_kernel_is_faster_than_its_bytes(name: str) -> None:
    gpu, sm = find_gpu(name), find_multiprocessor(name)
    work = _norm(4096, 1024, back=False)
    tiles = [Tile(Shape.ROW, r, 1024, w) for r in (1, 2, 4, 8) for w in (1, 2, 4, 8, 16)]
    best = best_tiles(work, tiles, gpu, sm)
    assert best
    limit = (work.read + work.written) / gpu.memory_bandwidth
    assert all(time.seconds > limit for _, time in best)
    assert best[0][1].seconds < 1.1 * min(time.seconds for _, time in best)


def test_more_of_anything_is_never_slower() -> None:
    work, tile = _norm(5000, 4096, back=False), Tile(Shape.ROW, 1, 4096, 8)
    before = kernel_seconds(work, tile, GPU, SM)
    assert before is not None
    better = [
        (replace_gpu, SM)
        for replace_gpu in (
            GPU.model_copy(update={"memory_bandwidth": 2 * GPU.memory_bandwidth}),
            GPU.model_copy(update={"multiprocessors": 2 * GPU.multiprocessors}),
        )
    ] + [
        (GPU, SM.model_copy(update={"memory_latency": SM.memory_latency / 2})),
        (GPU, SM.model_copy(update={"clock": 2 * SM.clock})),
        (GPU, SM.model_copy(update={"registers": 2 * SM.registers})),
    ]
    for gpu, sm in better:
        after = kernel_seconds(work, tile, gpu, sm)
        assert after is not None
        assert after.seconds <= before.seconds


def test_what_spills_is_no_candidate() -> None:
    work = replace(_norm(100, 16384, back=True), live=9.0)
    assert resident(work, Tile(Shape.STRIP, 1, 16384, 4, 132), SM) == 0
    assert kernel_seconds(work, Tile(Shape.STRIP, 1, 16384, 4, 132), GPU, SM) is None
    assert (
        kernel_seconds(work, Tile(Shape.STRIP, 1, 16384, 32, 132), GPU, SM) is None
    )  # 64 a thread
    assert resident(replace(work, live=2.0), Tile(Shape.STRIP, 1, 16384, 32, 132), SM) == 1


def test_grids() -> None:
    work = _norm(1000, 3000, back=False)
    assert grid(work, Tile(Shape.FLAT, 4, 1024, 4)) == 250 * 3
    assert grid(work, Tile(Shape.ROW, 4, 4096, 4)) == 250
    assert grid(work, Tile(Shape.STRIP, 1, 1024, 4, 132)) == 132 * 3


def test_a_row_too_wide_for_a_strip_is_read_twice() -> None:
    work = replace(_norm(8192, 16384, back=True), steady=1.5, read_each_pass=8192 * 16384 * 4.0)

    def time(shape: Shape, stages: int, of: KernelWork = work) -> float | None:
        found = kernel_seconds(of, Tile(shape, 1, 16384, 16, 132, stages), GPU, SM)
        return None if found is None else found.seconds

    assert time(Shape.STRIP, 1) is None  # 5 values each of 32 positions, in 128 registers
    alone, ahead = time(Shape.TWICE, 1), time(Shape.TWICE, 2)
    assert alone is not None
    assert ahead is not None
    assert ahead < alone
    assert time(Shape.TWICE, 3) is None  # two rows ahead, in two passes: 256 KiB
    once = time(Shape.STRIP, 1, replace(work, live=2.5))
    assert once is not None
    assert once < alone


def test_rows_beyond_the_l2_cache_are_read_again_from_memory() -> None:
    """Six rows a multiprocessor and what they write are more than half of an H200's 50 MiB."""
    work = replace(_norm(8192, 16384, back=False), read_each_pass=8192 * 16384 * 2.0)
    times = [
        kernel_seconds(work, Tile(Shape.LOOPED, 1, columns, warps), GPU, SM)
        for columns, warps in ((8192, 16), (4096, 8))
    ]
    few, many = (time for time in times if time is not None)
    assert few.resident < many.resident
    assert few.memory == pytest.approx((work.read + work.written) / 4.22e12, rel=0.01)
    assert many.memory > few.memory * 1.1


def test_no_program_waits_for_its_stores() -> None:
    """With every row written ten times, a chain of single programs takes as long as before."""
    tile = Tile(Shape.TWICE, 1, 16384, 16, 132, 2)
    work = replace(_norm(8192, 16384, back=True), steady=1.5, read_each_pass=8192 * 16384 * 4.0)
    before, after = (
        kernel_seconds(replace(work, written=written), tile, GPU, SM)
        for written in (work.written, 10 * work.written)
    )
    assert before is not None
    assert after is not None
    assert after.latency == before.latency
    assert after.memory > 3 * before.memory
    assert before.latency < before.memory  # so stores do not lengthen what hides behind memory


def test_warps_between_two_barriers_work_while_others_wait() -> None:
    """Arithmetic below the time of loads adds nothing to a row in passes, but to a whole row."""
    work = replace(_norm(8192, 16384, back=False), read_each_pass=8192 * 16384 * 2.0)

    def latency(shape: Shape, columns: int, operations: float) -> float:
        of = replace(work, lane_operations=operations)
        time = kernel_seconds(of, Tile(shape, 1, columns, 16), GPU, SM)
        assert time is not None
        return time.latency

    assert latency(Shape.LOOPED, 8192, 1) == latency(Shape.LOOPED, 8192, 6)
    assert latency(Shape.ROW, 16384, 1) < latency(Shape.ROW, 16384, 6)


# Tiles on an H100 by benchmarks/results/2026-11-25-h100-kernels: a norm's backward that reads rows
# twice, and forwards by whole rows and in passes.
MEASURED_WIDE = (
    (True, Tile(Shape.TWICE, 1, 16384, 16, 132, 2), 293e-6),
    (True, Tile(Shape.TWICE, 1, 16384, 16, 396, 2), 311e-6),
    (False, Tile(Shape.ROW, 1, 16384, 16), 180e-6),
    (False, Tile(Shape.LOOPED, 1, 8192, 16), 183e-6),
)


@pytest.mark.parametrize(("back", "tile", "measured"), MEASURED_WIDE)
def test_it_meets_rows_of_16384_columns_on_an_h100(back: bool, tile: Tile, measured: float) -> None:
    read = 8192 * 16384 * (4.0 if back else 2.0)
    work = replace(_norm(8192, 16384, back=back), steady=1.5, read_each_pass=read)
    time = kernel_seconds(
        work, tile, find_gpu("h100-sxm-80gb"), find_multiprocessor("h100-sxm-80gb")
    )
    assert time is not None
    assert time.seconds == pytest.approx(measured, rel=0.06)


def test_strips_read_rows_twice_only_where_no_row_can_be_held() -> None:
    tiles = [
        Tile(shape, 1, columns, 8, 132, 2)
        for shape in (Shape.TWICE, Shape.STRIP)
        for columns in (8192, 16384)
    ]
    work = replace(_norm(8192, 8192, back=True), steady=1.5, read_each_pass=8192 * 8192 * 4.0)
    first, *others = (tile for tile, _ in best_tiles(work, tiles, GPU, SM))
    assert first.shape is Shape.STRIP
    assert {tile.shape for tile in others} == {Shape.TWICE}


def test_of_equally_fast_tiles_that_with_the_shorter_last_wave_runs() -> None:
    """Two tiles of an H200's SwiGLU, whose memory hides all else: 188 and 190 us were measured."""
    count = 23831 * 5632
    work = KernelWork(1, count, 4.0 * count, 2.0 * count, 9, 2, 4, 1.0)
    few, many = Tile(Shape.FLAT, 1, 1024, 4), Tile(Shape.FLAT, 1, 4096, 4)
    (first, time), (second, later) = best_tiles(work, [many, few], GPU, SM)
    assert (first, second) == (few, many)
    assert time.seconds == pytest.approx(later.seconds, rel=0.01)
    assert time.waves > later.waves
