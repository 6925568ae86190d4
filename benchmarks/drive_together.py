"""One process that reads and writes a drive beside two that do, as ranks of one machine do.

    python -m benchmarks.drive_together [FOLDER]

Each process has a file of 2 GiB, filled before, and for SECONDS reads one half and writes the
other from two threads, in calls of the given size; with `busy` cores, torch adds tensors in all of
them meanwhile. Prints GB/s of all processes, both directions added up.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from itertools import product
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from bigplan.runtime.memory.disk import DiskFile
from bigplan.runtime.memory.slab import Slab

SIZE, SECONDS = 2 << 30, 4.0
CALLS = (64 << 20, 36 << 20, 8 << 20)  # bytes; 36 MiB are a layer's in 2026-11-26-h200-x2
PROCESSES = (1, 2)


def process(
    path: str, call: int, busy: bool, start: Barrier, moved: multiprocessing.Queue[int]
) -> None:
    """Move for SECONDS, then tell the bytes."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // start.parties))
    slab = Slab(2 * call, pinned=False)
    source, target = slab.take(call), slab.take(call)
    source.random_(255)
    half = SIZE // 2 // call * call
    total = [0, 0]
    with DiskFile(Path(path), SIZE) as file:
        for at in range(0, SIZE - call, call):
            file.write(at, source)
        start.wait()
        end = time.perf_counter() + SECONDS

        def go(which: int) -> None:
            at = 0
            while time.perf_counter() < end:
                if which:
                    file.write(half + at % half, source)
                else:
                    file.read(at % half, target)
                at += call
                total[which] += call

        threads = [threading.Thread(target=go, args=(which,)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        addends = torch.ones(2, 1 << 26)
        while busy and time.perf_counter() < end:
            addends[0].add_(addends[1])
        for thread in threads:
            thread.join()
    moved.put(sum(total))
    slab.close()


def main() -> None:
    """All numbers of processes and sizes of calls."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for busy, number, call in product((False, True), PROCESSES, CALLS):
            start, moved = context.Barrier(number), context.Queue()
            processes = [
                context.Process(target=process, args=(f"{scratch}/{n}", call, busy, start, moved))
                for n in range(number)
            ]
            for each in processes:
                each.start()
            rate = sum(moved.get(timeout=120) for _ in processes) / SECONDS
            for each in processes:
                each.join()
            cores = "busy" if busy else "idle"
            print(f"{cores} cores, {number} at once, {call >> 20} MiB: {rate / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
