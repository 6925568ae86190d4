"""AdamW on the CPU as a plan's run meets it: page-locked state, copies and waiting threads beside.

    python benchmarks/cpu_update.py [--millions 218.112] [--layers 5] [--threads 8,12,14,16]
        [--powers 19,20,21] [--no-pages]

Two tables, in G parameters/s; the defaults are a layer of llama-like-5.5b, and take 20 GB of host
memory. A layer's state is fp32 parameter, gradient and two moments and a 16-bit copy: 18 bytes.

1. By kind of pages and who touched them first, by torch's threads: the update, the update with its
   gradients divided inside the kernel, and seconds of casting the copy. The median of the layers.
2. In page-locked huge pages, divided and cast: torch's threads on a whole layer; parts of 2^power
   elements taken by as many cores of one thread each (bigplan/runtime/cpu/cores.py), which run
   torch's kernel or the compiled one (bigplan/runtime/cpu/step.cpp); and the compiled one on
   threads of its own. Alone, beside copies both ways, and beside those and a thread that waits
   busily for the GPU, or threads that queue small operators as lanes do. The median and the worst
   of the layers; of such a lane's 40 operators the milliseconds, the median and the slowest in ten.

Without CUDA nothing is page-locked, and there is no copy and no waiting thread. `--no-pages` leaves
the first table out.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from threading import Event
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigplan.mechanics import PAGE
from bigplan.runtime.cpu.cores import Cores
from bigplan.runtime.cpu.native import Native, native
from bigplan.runtime.memory.slab import touch
from bigplan.runtime.optimizer.adamw import adamw_kernel
from bigplan.runtime.optimizer.fused import VECTOR, Piece
from bigplan.spec.optimizer import Optimizer

BYTES = 18  # of state a parameter
ADAMW = adamw_kernel(Optimizer(), 2, 1e-3, 0.1)
DIVISOR = 1.001  # torch's kernel writes gradients back, and repeats shall not make them vanish
COPIED = 256 << 20  # bytes a copy
OPERATORS = 40
LANES = 5
SETTLES = 1.0  # seconds until what runs beside is under way

Work = Callable[[Piece], None]
Beside = Callable[[Event], None]


class Pages(NamedTuple):
    """A kind of host memory."""

    huge: bool
    touched_by_all: bool  # all cores, 64 MiB at a time; or one thread
    locked: bool  # for CUDA

    def __str__(self) -> str:
        size, by = "huge" if self.huge else "small", "all" if self.touched_by_all else "one"
        return f"{size} pages, touched by {by}{', locked' if self.locked else ''}"


KINDS = (
    Pages(huge=False, touched_by_all=False, locked=False),
    Pages(huge=True, touched_by_all=True, locked=False),
    Pages(huge=True, touched_by_all=False, locked=False),
    Pages(huge=False, touched_by_all=False, locked=True),
)
USED = Pages(huge=True, touched_by_all=True, locked=True)  # what the runtime's slab is


@contextmanager
def layers_in(pages: Pages, count: int, layers: int) -> Iterator[list[Piece]]:
    """That many pieces of `count` elements, one after the other in such memory."""
    nbytes = layers * count * BYTES
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE if pages.huge else mmap.MADV_NOHUGEPAGE)
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)
    if pages.touched_by_all:
        touch(buffer)
    else:
        torch.set_num_threads(1)
        buffer[::PAGE].zero_()
    if pages.locked:
        check(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, 0))
    pieces = [_piece(part, count) for part in buffer.split(count * BYTES)]
    try:
        yield pieces
    finally:
        pieces.clear()  # the caller's name for it would keep the memory
        if pages.locked:
            check(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))


def _piece(state: Tensor, count: int) -> Piece:
    parameter, gradient, *moments = state[: 16 * count].view(torch.float32).view(4, count)
    parameter.fill_(0.02)
    gradient.fill_(1e-3)
    return Piece(parameter, gradient, tuple(moments), state[16 * count :].view(torch.bfloat16))


def check(status: Any) -> None:
    """Raise where a CUDA call failed."""
    if int(status) != 0:
        raise RuntimeError(f"CUDA error {status} for host memory: try fewer --layers or --millions")


def copies(stop: Event) -> None:
    """Copies both ways between page-locked memory and the GPU, waited for asleep."""
    ways = []
    for up in (True, False):
        host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
        target, source = (device, host) if up else (host, device)
        ways.append((torch.cuda.Stream(), target, source))
    while not stop.is_set():
        ends = []
        for stream, target, source in ways:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
                ends.append(torch.cuda.Event(blocking=True))
                ends[-1].record()
        for end in ends:
            end.synchronize()


def spinning(stop: Event) -> None:
    """Products queued, and a thread that waits for them without sleeping."""
    stream = torch.cuda.Stream()
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    while not stop.is_set():
        with torch.cuda.stream(stream):
            for _ in range(20):
                x @ x
            end = torch.cuda.Event()
            end.record()
        end.synchronize()


class Queueing:
    """A thread that queues OPERATORS small operators every other millisecond, as a lane does."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, stop: Event) -> None:
        """Until told to stop."""
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.ones(16, device="cuda")
            while not stop.wait(0.002):
                start = time.perf_counter()
                for _ in range(OPERATORS):
                    x.add_(1)
                self.seconds.append(time.perf_counter() - start)


@contextmanager
def beside(works: Sequence[Beside]) -> Iterator[None]:
    """Each in a thread of its own meanwhile; raises the first error of one at the end."""
    if not works:
        yield
        return
    stop = Event()
    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(work, stop) for work in works]
        time.sleep(SETTLES)
        try:
            yield
        finally:
            stop.set()
    for work in running:
        work.result()


def seconds(layers: Sequence[Piece], work: Work) -> list[float]:
    """What `work` takes on each layer."""
    found = []
    for layer in layers:
        start = time.perf_counter()
        work(layer)
        found.append(time.perf_counter() - start)
    return found


def divided(piece: Piece) -> None:
    """torch's AdamW with gradients divided."""
    ADAMW.fused([piece], torch.tensor(DIVISOR))


def update(piece: Piece) -> None:
    """The same, and the cast."""
    divided(piece)
    piece.write_copy()


def compiled(library: Native, threads: int, piece: Piece) -> None:
    """All of that in one pass."""
    library.step(ADAMW.native, [piece], DIVISOR, threads)


def in_parts(work: Work, cores: Cores, size: int, piece: Piece) -> None:
    """Work on parts of `size` elements, which the cores take as they come."""
    starts = range(0, piece.elements, size)
    parts = (piece.part(start, min(start + size, piece.elements)) for start in starts)
    cores.run(partial(work, part) for part in parts)


def by_pages(layers: Sequence[Piece], label: str, threads: Sequence[int]) -> None:
    """Rows of the first table."""
    count = layers[0].elements / 1e9
    for number in threads:
        torch.set_num_threads(number)
        plain = statistics.median(seconds(layers, lambda piece: ADAMW.fused([piece], None)))
        scaled = statistics.median(seconds(layers, divided))
        cast = statistics.median(seconds(layers, Piece.write_copy))
        print(
            f"{label}, threads {number}: {count / plain:.2f} G/s, divided {count / scaled:.2f} "
            f"G/s, cast {cast * 1e3:.0f} ms",
            flush=True,
        )


def by_cores(
    layers: Sequence[Piece],
    label: str,
    threads: Sequence[int],
    powers: Sequence[int],
    lanes: Sequence[Queueing],
) -> None:
    """Rows of the second table."""

    def show(name: str, work: Work) -> None:
        for lane in lanes:
            lane.seconds.clear()
        found = seconds(layers, work)
        median, worst = (
            layers[0].elements / 1e9 / s for s in (statistics.median(found), max(found))
        )
        told = f"{label}, {name}: {median:.2f} G/s, worst {worst:.2f}"
        if late := sorted(second for lane in lanes for second in lane.seconds):
            middle, slow = late[len(late) // 2] * 1e3, late[len(late) * 9 // 10] * 1e3
            told += f"; a lane {middle:.2f} ms, slow {slow:.2f}"
        print(told, flush=True)

    library = native()
    for number in threads:
        torch.set_num_threads(number)  # Cores takes as many
        show(f"torch's threads {number}", update)
        if library:
            show(f"threads {number} of the compiled kernel", partial(compiled, library, number))
        kernels = {"torch's kernel": update}
        if library:
            kernels["compiled kernel"] = partial(compiled, library, 1)
        with Cores() as cores:
            for power, (kernel, work) in product(powers, kernels.items()):
                name = f"cores {number}, parts of 2^{power}, {kernel}"
                show(name, partial(in_parts, work, cores, 2**power))


def main() -> None:
    """Print both tables."""
    available = len(os.sched_getaffinity(0))
    usual = sorted({max(1, n) for n in (available // 2, available * 3 // 4, available - 2)})
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--millions", type=float, default=218.112, help="parameters a layer")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--threads", type=_numbers, default=[*usual, available])
    parser.add_argument("--powers", type=_numbers, default=[19, 20, 21], help="of parts' elements")
    parser.add_argument("--no-pages", action="store_true", help="without the first table")
    options = parser.parse_args()
    count = max(1, round(options.millions * 1e6 / VECTOR)) * VECTOR
    cuda = torch.cuda.is_available()
    print(f"torch {torch.__version__}, {available} cores, {options.layers} layers of {count}")
    if lscpu := shutil.which("lscpu"):
        lines = subprocess.run([lscpu], capture_output=True, text=True, check=True).stdout
        wanted = ("Model name", "Thread", "Socket", "L2", "L3", "NUMA")
        print(*(line for line in lines.splitlines() if line.startswith(wanted)), sep="\n")
    if not cuda:
        print("no CUDA: nothing is page-locked; copies and the waiting thread are left out")
    for pages in () if options.no_pages else (*KINDS, USED):
        if pages.locked and not cuda:
            continue
        with layers_in(pages, count, options.layers) as layers:
            by_pages(layers, str(pages), options.threads)
            if pages == USED:
                with beside([copies]):
                    by_pages(layers, f"{pages}, beside copies", options.threads)
    lanes = [Queueing() for _ in range(LANES)]
    conditions: dict[str, list[Beside]] = {
        "alone": [],
        "copies": [copies],
        "copies and waiting": [copies, spinning],
        "copies and lanes": [copies, *lanes],
    }
    with layers_in(USED._replace(locked=cuda), count, options.layers) as layers:
        for label, works in conditions.items():
            if works and not cuda:
                continue
            with beside(works):
                busy = [lane for lane in lanes if lane in works]
                by_cores(layers, label, options.threads, options.powers, busy)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
