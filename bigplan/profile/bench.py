"""What every probe works with: the devices, their threads, a clock, and how sources are worded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from bigplan.profile.budget import Clock, median_seconds
from bigplan.runtime.slab import available_host_memory
from bigplan.spec.cluster import Gpu

# Of the memory that is free a probe's tensors take so much at most: this is no run, and others may
# be at work here.
MOST_OF_MEMORY = 1 / 8


@dataclass(frozen=True, slots=True)
class Bench:
    """The machine under measurement. `threads` are one device's share of the `cores`, on a CPU."""

    devices: tuple[torch.device, ...]
    cores: int
    threads: int
    folder: Path | None = None
    quick: bool = True
    clock: Clock = time.perf_counter

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
        timed = self._on_gpu(work) if self.cuda else self._on_cpu(work)
        return median_seconds(timed, seconds, self.clock)

    def _on_gpu(self, work: Callable[[], object]) -> Callable[[int], float]:
        def timed(runs: int) -> float:
            start, stop = event(), event()
            start.record()
            for _ in range(runs):
                work()
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) / 1e3

        return timed

    def _on_cpu(self, work: Callable[[], object]) -> Callable[[int], float]:
        def timed(runs: int) -> float:
            start = self.clock()
            for _ in range(runs):
                work()
            return self.clock() - start

        return timed

    def median_on_host(self, work: Callable[[], object], seconds: float) -> float:
        """Median seconds of `work` by the host's clock; on a GPU, of work that waits for itself."""
        return median_seconds(self._on_cpu(work), seconds, self.clock)

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


def event() -> torch.cuda.Event:
    """A CUDA event that tells times and lets the host sleep while it waits."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


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
