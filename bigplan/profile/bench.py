"""What every probe works with: the devices, their threads, a clock, and how sources are worded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bigplan.profile.budget import ReadClock, median_seconds
from bigplan.profile.load import Load, event
from bigplan.profile.sensors import Watch, watching
from bigplan.runtime.memory.slab import available_host_memory
from bigplan.spec.gpu import Gpu

if TYPE_CHECKING:
    from bigplan.profile.peers import Peers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Share of the free host memory that a probe's tensors may take: others may be at work here.
MOST_OF_MEMORY = 1 / 8
ROUNDS_BEFORE = 3  # of load, some 30 ms, before a median: until then the GPU may have idled
READ_EVERY = 0.2  # seconds between looks at the GPU's clock and power


@dataclass(frozen=True, slots=True)
class Bench:
    """The machine under measurement.

    On a CPU, `threads` is one device's share of the `cores`. With a `load`, which has been heated
    by then, a GPU's work is measured between rounds of that load. `peers` are the processes that
    stand for several CPU devices.
    """

    devices: tuple[torch.device, ...]
    cores: int
    threads: int
    folder: Path | None = None
    quick: bool = True
    clock: ReadClock = time.perf_counter
    load: Load | None = None
    peers: Peers | None = None

    @property
    def device(self) -> torch.device:
        """The device that stands for all of them."""
        return self.devices[0]

    @property
    def cuda(self) -> bool:
        """Whether the devices are GPUs."""
        return self.device.type == "cuda"

    def median(self, work: Callable[[], object], seconds: float) -> float:
        """Median seconds of `work` on the device, measured for about `seconds`."""
        timed = self._on_gpu(work) if self.cuda else self._on_cpu(work, self._core_clock)
        if self.load is not None:
            work()  # the first run loads kernels and makes plans, and the GPU idles meanwhile
            for _ in range(ROUNDS_BEFORE):
                self.load.queue()
        return median_seconds(timed, seconds, self.clock)

    def _on_gpu(self, work: Callable[[], object]) -> Callable[[int], float]:
        def timed(runs: int) -> float:
            start, stop = event(), event()
            start.record()
            for _ in range(runs):
                work()
            stop.record()
            if self.load is not None:
                self.load.queue()  # keeps the GPU busy until the host wakes up and queues more
            stop.synchronize()
            return float(start.elapsed_time(stop)) / 1e3

        return timed

    @property
    def _core_clock(self) -> ReadClock:
        """The thread's CPU time where a device is one core, else the wall clock.

        The thread's time leaves out what other processes take of the core.
        """
        return time.thread_time if self.threads == 1 else self.clock

    def _on_cpu(self, work: Callable[[], object], clock: ReadClock) -> Callable[[int], float]:
        def timed(runs: int) -> float:
            start = clock()
            for _ in range(runs):
                work()
            return clock() - start

        return timed

    def median_on_host(self, work: Callable[[], object], seconds: float) -> float:
        """Median seconds of `work` by the host's clock; on a GPU `work` waits for its own end."""
        return median_seconds(self._on_cpu(work, self.clock), seconds, self.clock)

    @contextmanager
    def conditions(self) -> Iterator[Conditions]:
        """Watch the GPU during the block; a figure's source then says what was seen."""
        if self.load is None:
            yield Conditions("", Watch())
            return
        with watching(self.device, READ_EVERY) as watch:
            state = "sustained load" if self.load.settled else "load, its rate still changing"
            yield Conditions(f", under {state}", watch)

    def device_memory(self) -> int:
        """Bytes of device memory that a probe may take."""
        if self.cuda:
            free, _ = torch.cuda.mem_get_info(self.device)
            return free // 2
        return self.host_memory() // 4

    def host_memory(self) -> int:
        """Bytes of host memory that a probe may take."""
        return int(available_host_memory() * MOST_OF_MEMORY)

    def precisions(self, gpu: Gpu) -> tuple[str, ...]:
        """Precisions in which torch multiplies on the device, the one of training first."""
        known: list[str] = [p for p in ("bf16", "fp16", "fp32") if p in gpu.peak_flops]
        return tuple(known) if self.cuda else ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of a measurement as the end of a sentence; '' where nothing is known."""

    load: str
    watch: Watch

    def __str__(self) -> str:
        """Such as ', under sustained load at 1.32 GHz, 690 W, limited by power'."""
        seen = str(self.watch)
        return f"{self.load} at {seen}" if seen else self.load


def source(how: str) -> str:
    """The source of a number that was measured `how`."""
    return f"measured {date.today().isoformat()} by bigplan profile: {how}"


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch use `number` threads for the length of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
