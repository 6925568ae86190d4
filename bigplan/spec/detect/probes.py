"""Short measurements of this machine's cores, memory and disk: under five seconds together."""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bigplan.mechanics import DISK_THREADS, TRANSFER_BYTES

PROBE_BYTES = 96 * 2**20  # of the file that a drive is measured with


@dataclass(frozen=True)
class GemmRate:
    """fp32 GEMM on all cores: FLOP/s for endless K, and K0 in the factor K / (K + K0)."""

    peak: float
    half_k: float


@dataclass(frozen=True)
class DiskRate:
    """Bytes/s of large reads and writes, seconds of a 4 KiB read, and how it was measured."""

    read: float
    write: float
    latency: float
    how: str


def _times(action: Callable[[], object], budget: float) -> list[float]:
    """Seconds of `action`, repeated for `budget` seconds, after one run to warm up."""
    action()
    times: list[float] = []
    end = time.perf_counter() + budget
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times


def probe_gemm(budget: float = 0.4) -> GemmRate:
    """Rates of numpy's fp32 GEMM at K = 128 and K = 1024, from which K0 follows.

    The fastest runs count. The product's threads wait for each other, so one busy core of other
    programs makes most runs several times too long.
    """
    import numpy as np

    rates = []
    for inner in (128, 1024):
        a = np.ones((768, inner), np.float32)
        b = np.ones((inner, 768), np.float32)
        c = np.empty((768, 768), np.float32)
        seconds = min(_times(lambda a=a, b=b, c=c: np.matmul(a, b, out=c), budget))  # type: ignore[misc]
        rates.append(2 * 768 * 768 * inner / seconds)
    small, large = rates
    # rate(K) = peak K / (K + K0) through both points; K0 = 0 where noise has them swapped.
    half_k = max(0.0, (large - small) / max(small / 128 - large / 1024, 1e-9))
    half_k = min(half_k, 1024.0)
    return GemmRate(peak=large * (1024 + half_k) / 1024, half_k=half_k)


def probe_copy(threads: int, budget: float = 0.5) -> float:
    """Bytes/s read plus written by `threads` threads that copy 64 MiB together."""
    import numpy as np

    source = np.ones(64 * 2**20, np.uint8)
    target = np.empty_like(source)
    pieces = list(
        zip(np.array_split(source, threads), np.array_split(target, threads), strict=True)
    )
    with ThreadPoolExecutor(threads) as pool:
        times = _times(
            lambda: list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pieces)), budget
        )
    return 2 * source.nbytes / statistics.median(times)


def probe_disk(folder: Path, size: int = PROBE_BYTES) -> DiskRate | None:
    """Write and read `size` bytes in `folder`; None where it cannot be written to.

    O_DIRECT where the file system allows it, else through the page cache, and `how` says so.
    """
    for flag, how in ((os.O_DIRECT, "O_DIRECT"), (0, "buffered, O_DIRECT is refused here")):
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".bigplan-probe-") as file:
                return _disk_rates(file.name, flag, size, how)
        except OSError:
            continue
    return None


def _disk_rates(name: str, flag: int, size: int, how: str) -> DiskRate:
    descriptor = os.open(name, os.O_RDWR | flag)
    try:
        os.posix_fallocate(descriptor, 0, size)
        _transfer(descriptor, size, os.pwritev)  # a place's first bytes can take twice as long
        write = _transfer(descriptor, size, os.pwritev)
        # Only matters without O_DIRECT: otherwise the read would come from memory.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        latency = _small_read(descriptor, size)
        read = _transfer(descriptor, size, os.preadv)
    finally:
        os.close(descriptor)
    return DiskRate(read=read, write=write, latency=latency, how=how)


def _transfer(
    descriptor: int, size: int, move: Callable[[int, list[mmap.mmap], int], int]
) -> float:
    """Bytes/s of moving `size` bytes in chunks; a slow disk is cut off after a second."""
    end = time.perf_counter() + 1.0

    def work(worker: int) -> int:
        moved = 0
        with mmap.mmap(-1, TRANSFER_BYTES) as buffer:  # Page-aligned, as O_DIRECT needs.
            for offset in range(worker * TRANSFER_BYTES, size, DISK_THREADS * TRANSFER_BYTES):
                if moved and time.perf_counter() > end:
                    break
                moved += move(descriptor, [buffer], offset)
        return moved

    start = time.perf_counter()
    with ThreadPoolExecutor(DISK_THREADS) as pool:
        moved = sum(pool.map(work, range(DISK_THREADS)))
    if move is os.pwritev:
        os.fdatasync(descriptor)
    return moved / (time.perf_counter() - start)


def _small_read(descriptor: int, size: int) -> float:
    times = []
    with mmap.mmap(-1, 4096) as buffer:
        for index in range(16):
            offset = (index * 7919 * 4096) % (size - 4096)
            start = time.perf_counter()
            os.preadv(descriptor, [buffer], offset)
            times.append(time.perf_counter() - start)
    return statistics.median(times)
