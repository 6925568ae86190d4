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
from bigplan.runtime.slab import available_host_memory
from bigplan.spec.gpu import Gpu

if TYPE_CHECKING:
    from bigplan.profile.peers import Peers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Of the memory that is free a probe's tensors take so much at most: this is no run, and others may
# be at work here.
MOST_OF_MEMORY = 1 / 8
ROUNDS_BEFORE = 3  # of load, some 30 ms, before a median: the GPU may have waited for the host
READ_EVERY = 0.2  # seconds between looks at the GPU's clock and power


@dataclass(frozen=True, slots=True)
class Bench:
    """The machine under measurement. `threads` are one device's share of the `cores`, on a CPU.

    With a `load`, which is hot by then, what a GPU does is measured between rounds of it. `peers`
    are the processes of several CPU devices.
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
            work()  # while its kernels are loaded and its plans are made the GPU waits
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
                self.load.queue()  # the GPU works on while the host wakes up and queues the next
            stop.synchronize()
            return float(start.elapsed_time(stop)) / 1e3

        return timed

    @property
    def _core_clock(self) -> ReadClock:
        """Of a device that is one core, that core's time: what others take of it does not count.

        Of work of several threads the wall's.
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
        """Median seconds of `work` by the host's clock; on a GPU, of work that waits for itself."""
        return median_seconds(self._on_cpu(work, self.clock), seconds, self.clock)

    @contextmanager
    def conditions(self) -> Iterator[Conditions]:
        """The state of the GPU for the length of the block, to be told in a source after it."""
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
        """Those that torch multiplies in on the device, the one of training first."""
        known: list[str] = [p for p in ("bf16", "fp16", "fp32") if p in gpu.peak_flops]
        return tuple(known) if self.cuda else ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which something was measured, as the end of a sentence; '' where nothing is known."""

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
    """Torch with so many threads for the length of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rounded(value: float) -> float:
    """Three digits: a short measurement has no more."""
    return float(f"{value:.3g}")
