"""State that would outlive its process: first touches and the CPU's update in shared memory.

    python benchmarks/shared_memory.py [--mib 1152] [--threads 2] [--repeats 5]

By kind of memory, for a block of so many MiB (three fp32 values a parameter and its gradient):
seconds and CPU seconds until all pages are there, MiB of them in huge pages, seconds until a second
mapping has them all (what a process that starts again would do), the compiled AdamW in G parameters
a second of CPU time, and the same with a mark of the step before and after every layer of 4 M
parameters.

private     what the slab takes: anonymous, MADV_HUGEPAGE
shared      a memfd, MADV_HUGEPAGE: huge pages where the kernel's shmem_enabled is `advise` or more
collapsed   the same, put into huge pages by MADV_COLLAPSE, which asks no setting (Linux 6.1)
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from bigplan.runtime.cpu.native import Piece, native
from bigplan.runtime.memory.slab import touch
from bigplan.runtime.optimizer.adamw import adamw_kernel
from bigplan.spec.optimizer import Optimizer

COLLAPSE = 25  # MADV_COLLAPSE, which Python's mmap does not know
PART = 1 << 22  # parameters between two marks: a small layer
KERNEL = adamw_kernel(Optimizer(), 2, 1e-3, 0.1)
LIBC = ctypes.CDLL(None, use_errno=True)


def private(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def shared(nbytes: int) -> tuple[mmap.mmap, int]:
    descriptor = os.memfd_create("bigplan")
    os.ftruncate(descriptor, nbytes)
    return mmap.mmap(descriptor, nbytes), descriptor


def seen(mapping: mmap.mmap) -> Tensor:
    return torch.frombuffer(mapping, dtype=torch.uint8)


def huge_mib(place: Tensor) -> float:
    """Of the mapping that begins at the tensor, as the kernel counts them."""
    start, found = f"{place.data_ptr():x}-", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            low, high = (int(each, 16) for each in line.split(" ")[0].split("-"))
            found = line.startswith(start) or low <= place.data_ptr() < high
        elif found and line.startswith(("AnonHugePages", "ShmemPmdMapped")):
            kib = int(line.split()[1])
            if kib:
                return kib / 1024
    return 0.0


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and CPU seconds of all threads."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, spent


def collapse(place: Tensor) -> None:
    address = ctypes.c_void_p(place.data_ptr())
    if LIBC.madvise(address, ctypes.c_size_t(place.numel()), COLLAPSE):
        print("   MADV_COLLAPSE:", os.strerror(ctypes.get_errno()))


def pieces(place: Tensor) -> Iterator[Piece]:
    values = place.view(torch.float32).view(4, -1)
    whole = Piece(values[0], values[1], (values[2], values[3]))
    for start in range(0, whole.elements, PART):
        yield whole.part(start, start + PART)


def rate(place: Tensor, threads: int, repeats: int, *, marked: bool) -> float:
    """G parameters a second of the CPU's time, of the best repeat: the machine is shared."""
    library = native()
    assert library is not None, "no C++ compiler here"
    found, parts = [], list(pieces(place))
    marks = torch.zeros(len(parts), 2, dtype=torch.int64).numpy()
    for step in range(repeats):

        def update(step: int = step) -> None:
            for number, part in enumerate(parts):
                if marked:
                    marks[number, 0] = step
                library.step(KERNEL.native, [part], 1.0, threads)
                if marked:
                    marks[number, 1] = step

        found.append(sum(part.elements for part in parts) / timed(update)[1] / 1e9)
    return max(found)


def row(kind: str, nbytes: int, threads: int, repeats: int) -> None:
    mapping, descriptor = (private(nbytes), -1) if kind == "private" else shared(nbytes)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    place = seen(mapping)

    def first() -> None:
        if kind == "collapsed":
            collapse(place)
        touch(place)

    seconds, spent = timed(first)
    huge, again = huge_mib(place), "-"
    if descriptor >= 0:
        other = seen(mmap.mmap(descriptor, nbytes))
        again = f"{timed(lambda: int(other[::4096].sum()))[0]:.2f}"
        del other
    place.view(torch.float32).fill_(1e-3)
    plain, marked = (rate(place, threads, repeats, marked=each) for each in (False, True))
    print(
        f"{kind:10} {seconds:8.2f} {spent:8.2f} {huge:9.0f} {again:>7} {plain:8.3f} {marked:8.3f}",
        flush=True,
    )
    if descriptor >= 0:
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1152)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    settings = Path("/sys/kernel/mm/transparent_hugepage")
    for name in ("enabled", "shmem_enabled", "defrag"):
        print(f"{name}: {(settings / name).read_text().strip()}")
    print(f"Linux {os.uname().release}, load {statistics.fmean(os.getloadavg()):.1f}")
    print(
        f"{'':10} {'touch s':>8} {'CPU s':>8} {'huge MiB':>9} {'again':>7} {'G/s':>8} {'marked':>8}"
    )
    for _ in range(given.rounds):
        for kind in ("private", "shared", "collapsed"):
            row(kind, given.mib << 20, given.threads, given.repeats)


if __name__ == "__main__":
    main()
