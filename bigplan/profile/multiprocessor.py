"""What no datasheet says of a GPU's multiprocessors: latencies, the L2 cache, starts of kernels.

Each figure comes from a kernel that waits for nothing else. A latency is the time of one step of a
chain: two lengths of the chain are timed, so that the launch drops out. Rates are those of loads
that the L2 cache holds. CUDA only.

The result is a description as in bigplan/hardware/multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bigplan.cost.kernel import STEPS_IN_WARP
from bigplan.errors import InputError, quoted
from bigplan.kernels.handwritten.probes import chase, exchange, nothing, powers, read
from bigplan.profile.bench import source
from bigplan.profile.load import event
from bigplan.spec.multiprocessor import Multiprocessor, find_multiprocessor, named_as
from bigplan.units import rounded

LINE = 128  # bytes that a load from memory brings at least
WORDS = LINE // 4  # elements of 4 bytes in a line
REPEATS = 7
STEPS = 20_000  # of a chain: 10 ms at half a microsecond each
WARPS = 4  # of the program whose lanes exchange
RESIDENT = 2**24  # bytes that any GPU's L2 cache holds while they are read again
STARTS = 200  # kernels of a graph


def cycle(lines: int, device: torch.device) -> Tensor:
    """An int32 table whose entries lead through all lines in random order, and back."""
    generator = torch.Generator(device).manual_seed(0)
    order = torch.randperm(lines, generator=generator, device=device)
    table = torch.zeros(lines * WORDS, dtype=torch.int32, device=device)
    table[order * WORDS] = (order.roll(-1) * WORDS).int()
    return table


@dataclass(frozen=True)
class GpuFigure:
    """A figure of a multiprocessor, and how it was measured."""

    value: float
    how: str


class KernelClock:
    """Times the probing kernels on one GPU, whose shipped description is `known`."""

    def __init__(self, device: torch.device, known: Multiprocessor) -> None:
        self.device, self.known = device, known
        self.count = torch.cuda.get_device_properties(device).multi_processor_count
        self.out = torch.zeros(2**20, device=device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Median seconds of `work` by CUDA events."""
        times = []
        for _ in range(REPEATS + 2):
            start, stop = event(), event()
            start.record()
            work()
            stop.record()
            stop.synchronize()
            times.append(float(start.elapsed_time(stop)) / 1e3)
        return median(times[2:])

    def step(self, run: Callable[[int], object]) -> float:
        """Seconds of one step of a chain; `run(n)` takes n steps."""
        return (self.seconds(lambda: run(2 * STEPS)) - self.seconds(lambda: run(STEPS))) / STEPS

    def clock(self) -> tuple[GpuFigure, GpuFigure]:
        """Cycles a second, and exponentials a cycle."""
        clocks, block, warps = torch.zeros(2, dtype=torch.int64, device=self.device), 8192, 32

        def run() -> None:
            powers[(self.count,)](self.out, clocks, STEPS, BLOCK=block, num_warps=warps)

        self.seconds(run)
        cycles, nanoseconds = clocks.tolist()
        rate = block * STEPS / cycles
        how = f"counters of a kernel of {STEPS:,} rounds of exponentials on every multiprocessor"
        return GpuFigure(cycles / nanoseconds * 1e9, how), GpuFigure(rate, how)

    def memory_latency(self) -> GpuFigure:
        """Seconds of a load that neither cache holds."""
        table = cycle(4 * self.known.l2_memory // LINE, self.device)
        # A chain goes on where the last one ended: begun anew it would find its lines in L2.
        place = torch.zeros(1, dtype=torch.int32, device=self.device)
        seconds = self.step(lambda steps: chase[(1,)](table, place, steps, num_warps=1))
        return GpuFigure(seconds, f"a chain of loads through {table.numel() * 4 / 2**20:.0f} MiB")

    def shared_latency(self) -> GpuFigure:
        """Seconds of an exchange, by a warp's lanes or by warps through shared memory."""
        columns = 32 * WARPS

        def run(steps: int) -> object:
            return exchange[(1,)](self.out, steps, COLUMNS=columns, num_warps=WARPS)

        exchanges = STEPS_IN_WARP + 2 + log2(WARPS)
        how = f"sums over {WARPS} warps, each of the one before, as {exchanges:.0f} exchanges"
        return GpuFigure(self.step(run) / exchanges, how)

    def l2(self) -> GpuFigure:
        """Bytes a second that all multiprocessors read from L2."""
        return GpuFigure(self._reading(8 * self.count, 4096, 8), _from_l2("all multiprocessors"))

    def load_bytes(self, clock: float) -> GpuFigure:
        """Bytes a cycle that one multiprocessor reads from L2."""
        return GpuFigure(self._reading(1, 16384, 32) / clock, _from_l2("one multiprocessor"))

    def _reading(self, programs: int, block: int, warps: int) -> float:
        table = torch.zeros(RESIDENT // 4, device=self.device)
        out = torch.empty(programs * block, device=self.device)
        turns = max(64, 2**31 // (programs * block * 4)) if programs > 1 else 2**14

        def run() -> None:
            read[(programs,)](table, out, table.numel(), turns, BLOCK=block, num_warps=warps)

        return 4.0 * programs * block * turns / self.seconds(run)

    def kernel_start(self) -> GpuFigure:
        """Seconds from one kernel of a stream to the next, in a CUDA graph: without the host."""
        nothing[(1,)](self.out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(STARTS):
                nothing[(1,)](self.out)
        return GpuFigure(self.seconds(graph.replay) / STARTS, f"a graph of {STARTS} empty kernels")


def _from_l2(who: str) -> str:
    return f"{who} read {RESIDENT / 2**20:.0f} MiB again and again"


def measure_multiprocessor(device: torch.device) -> tuple[Multiprocessor, Multiprocessor]:
    """The shipped description of this GPU, and the same with what was measured. Raises InputError.

    Figures of the programming guide stay as they are: registers, threads, lanes, shared memory.
    """
    reported = torch.cuda.get_device_name(device)
    name = named_as(reported)
    if name is None:
        raise InputError(
            f"no shipped description is of {quoted(reported)}; copy the one of the closest GPU "
            "type in bigplan/hardware/multiprocessors and change what differs first"
        )
    known = find_multiprocessor(name)
    with torch.cuda.device(device):
        bench = KernelClock(device, known)
        clock, special = bench.clock()
        found = {
            "clock": clock,
            "special": GpuFigure(float(round(special.value)), special.how),
            "l2_bandwidth": bench.l2(),
            "load_bytes": bench.load_bytes(clock.value),
            "memory_latency": bench.memory_latency(),
            "shared_latency": bench.shared_latency(),
            "kernel_start": bench.kernel_start(),
        }
    return known, replaced(known, found)


def replaced(known: Multiprocessor, found: dict[str, GpuFigure]) -> Multiprocessor:
    """A description with measured figures, each with its source."""
    values: dict[str, Any] = known.model_dump() | {n: rounded(m.value) for n, m in found.items()}
    for name in ("special", "load_bytes"):  # whole numbers
        if name in found:
            values[name] = max(1, round(found[name].value))
    values["sources"] = {**known.sources, **{n: source(m.how) for n, m in found.items()}}
    return Multiprocessor.model_validate(values)


__all__ = ["GpuFigure", "KernelClock", "cycle", "measure_multiprocessor", "replaced"]
