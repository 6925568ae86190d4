"""The drive that tensors may go to: reads and writes like the runtime's, alone and together."""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from bigplan.errors import InputError
from bigplan.mechanics import PAGE
from bigplan.profile.bench import Bench, source
from bigplan.runtime.memory.disk import DiskFile
from bigplan.runtime.memory.slab import Slab, available_disk
from bigplan.spec.cluster import NodeGroup
from bigplan.units import format_bytes, rounded

MiB = 2**20
MOST = 4 * 2**30  # bytes of the file: more than a drive's own cache
SHARE = 4  # the file takes at most one part in so many of the free disk
MOVED = 64 * MiB  # bytes of one call, as for a layer's state
SMALL_READS = 32


def measure_drive(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """Measure read, write, both_ways and latency of `nvme`, in a file that is then removed.

    Raises InputError where the folder has no room or cannot be written to.
    """
    nvme, folder = group.nvme, bench.folder
    assert nvme is not None and folder is not None, "asked only where a folder was named"
    size = _size(folder)
    slab = Slab(2 * MOVED, pinned=bench.cuda)
    try:
        with _file(folder, size) as file:
            rates = _rates(file, (slab.take(MOVED), slab.take(MOVED)), bench, seconds)
            latency = _latency(file, bench)
            direct = file.direct
    finally:
        slab.close()
    via = "O_DIRECT" if direct else "through the page cache: O_DIRECT is refused here"
    how = source(f"{format_bytes(size)} written again in calls of {format_bytes(MOVED)}, {via}")
    values = {name: rounded(rate / nvme.drives) for name, rate in rates.items()}
    sources = dict.fromkeys(values, how) | {"latency": source(f"reads of 4 KiB, {via}")}
    drives = nvme.replaced(values | {"latency": float(f"{latency:.2g}")}, sources)
    return group.model_copy(update={"nvme": drives})


def _size(folder: Path) -> int:
    size = min(MOST, available_disk(folder) // SHARE) // MOVED * MOVED
    if size < 4 * MOVED:
        raise InputError(
            f"{folder} has {format_bytes(available_disk(folder))} free, and measuring takes a "
            f"quarter of it, at least {format_bytes(4 * MOVED)}; free some, or leave --nvme out"
        )
    return size


def _file(folder: Path, size: int) -> DiskFile:
    try:
        # A name of its own: another run's file must never be overwritten.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".bigplan-profile-") as taken:
            name = Path(taken.name)
        return DiskFile(name, size)
    except OSError as error:
        raise InputError(
            f"cannot write to {folder} ({error.strerror}); name another folder with --nvme"
        ) from None


def _rates(
    file: DiskFile, buffers: tuple[Tensor, Tensor], bench: Bench, seconds: float
) -> dict[str, float]:
    """Bytes/s of writing, of reading, and of both at once in two halves of the written bytes.

    A step writes where the step before wrote, so the file is filled first. On an ext4 volume of a
    virtual machine the first write to a place ran at 2.9 GB/s, all later ones at 5.0 to 5.8
    (benchmarks/drive_rewrite.py).
    """
    for buffer in buffers:
        buffer.random_(255)  # random bytes: some drives compress
    each = seconds / 4
    filled, _ = _window(lambda at: file.write(at, buffers[0]), file.size, bench, each)
    whole = min(file.size, max(filled, 2 * MOVED))
    written = _window(lambda at: file.write(at, buffers[0]), whole, bench, each)
    read = _window(lambda at: file.read(at, buffers[1]), whole, bench, each)
    both = _both(file, buffers, whole // 2 // MOVED * MOVED, bench, each)
    return {"write": written[0] / written[1], "read": read[0] / read[1], "both_ways": both}


def _both(
    file: DiskFile, buffers: tuple[Tensor, Tensor], half: int, bench: Bench, seconds: float
) -> float:
    """Bytes/s of reading the file's first `half` bytes and writing the next, added up."""
    stop = threading.Event()
    results: dict[str, tuple[int, float]] = {}
    errors: list[OSError] = []

    def move(name: str, work: Callable[[int], None]) -> None:
        try:
            results[name] = _window(work, half, bench, seconds, stop)
        except OSError as error:  # raised again below
            errors.append(error)

    workers = [
        threading.Thread(target=move, args=("read", lambda at: file.read(at, buffers[1]))),
        threading.Thread(
            target=move,
            args=("write", lambda at: file.write(half + at, buffers[0])),
        ),
    ]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    finally:  # also after Ctrl-C: the file may be closed only when no worker uses it
        stop.set()
        for worker in workers:
            worker.join()
    if errors:
        raise errors[0]
    return sum(moved / took for moved, took in results.values())


def _window(
    move: Callable[[int], None],
    size: int,
    bench: Bench,
    seconds: float,
    stop: threading.Event | None = None,
) -> tuple[int, float]:
    """Bytes that successive calls move, over `size` bytes again and again, and their seconds."""
    start, moved = bench.clock(), 0
    for at in _around(size):
        move(at)
        moved += MOVED
        if bench.clock() - start >= seconds or (stop is not None and stop.is_set()):
            break
    return moved, bench.clock() - start


def _around(size: int) -> Iterator[int]:
    """Offsets of calls within `size` bytes, again and again."""
    while True:
        yield from range(0, size, MOVED)


def _latency(file: DiskFile, bench: Bench) -> float:
    """Median seconds of reading one page, at places far apart."""
    times = []
    slab = Slab(PAGE, pinned=False)
    page = slab.take(PAGE)
    for number in range(SMALL_READS):
        at = number * 7919 * PAGE % (MOVED - PAGE)
        start = bench.clock()
        file.read(at, page)
        times.append(bench.clock() - start)
    return statistics.median(times)
