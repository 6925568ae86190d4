"""The machine on which kernels are measured: its clocks, its copy rate, and the records so far.

Times are medians by CUDA events. Between two calls a buffer larger than the L2 cache is
overwritten, so inputs are not in that cache. On a CPU, for rehearsals, times are the clock's and
mean nothing. Graph times replay a CUDA graph of several calls, without the host.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from bigplan.kernels.here import runs_kernels
from bigplan.kernels.optimised import Optimiser

CALLS, WARM = 15, 3
GRAPH_CALLS = 5
QUEUED = 2_000_000  # cycles, a millisecond, in which the host queues a call
MOST_SECONDS = 540  # of a part: what is left then is named, not measured
KernelRecord = dict[str, Any]


class KernelBench:
    """One run on this machine: its device, copy bandwidth and records."""

    def __init__(self, out: Path | None, console: Console, *, rehearse: bool, tune: int) -> None:
        self.small, self.out, self.tune = rehearse, out, tune
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"
        # A backward runs on the stream of its forward, and a CUDA graph captures one stream.
        stream: Any = torch.cuda.Stream
        self.stream = stream() if self.cuda else None
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.optimiser = Optimiser(None, 0.0)
        size = max(2**20, 2 * self.optimiser.pricer.sm.l2_memory) if self.cuda else 2**10
        self.other = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.copy = self._copy_rate()
        self.console, self.records = console, list[KernelRecord]()
        self.began = 0.0
        self.record("machine", **self._machine())

    def record(self, kind: str, **values: object) -> None:
        """Keep it, and append a line to the file."""
        self.records.append({"kind": kind, **values})
        if self.out is not None:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **values}) + "\n")

    def _machine(self) -> KernelRecord:
        name = torch.cuda.get_device_name() if self.cuda else "cpu, rehearsed"
        return {"device": name, "torch": torch.__version__, "copy": self.copy,
                "priced_for": self.optimiser.gpu, "generated": runs_kernels({self.device}),
                "dtype": str(self.dtype)}  # fmt: skip

    def late(self, name: str) -> bool:
        """Whether the part's time is up; what is left out is recorded."""
        if time.monotonic() - self.began < MOST_SECONDS:
            return False
        self.record("left out", case=name)
        return True

    def seconds(self, work: Callable[[], object]) -> float:
        """Median of calls with a cold cache."""
        for _ in range(1 if self.small else WARM):
            work()
        times = []
        for _ in range(1 if self.small else CALLS):
            self.other.zero_()
            if not self.cuda:
                began = time.perf_counter()
                work()
                times.append(time.perf_counter() - began)
                continue
            event: Any = torch.cuda.Event
            start, end = event(enable_timing=True), event(enable_timing=True)
            _sleep(QUEUED)
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return median(times)

    def in_graph(self, work: Callable[[], object]) -> float | None:
        """Seconds of a call in a CUDA graph, without those of overwriting the cache; None: none."""
        if not self.cuda:
            return None

        def many(flush: bool) -> float:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for _ in range(GRAPH_CALLS):
                    self.other.zero_()
                    if flush:
                        continue
                    work()
            return self.seconds(graph.replay) / GRAPH_CALLS

        try:
            work()
            return max(0.0, many(False) - many(True))
        except RuntimeError:  # some baselines synchronise
            torch.cuda.synchronize()
            return None

    def _copy_rate(self) -> float:
        size = 2**30 if self.cuda else 2**20
        a = torch.ones(size, dtype=torch.uint8, device=self.device)
        b = torch.empty_like(a)
        return 2 * size / self.seconds(lambda: b.copy_(a))


def _sleep(cycles: int) -> None:
    wait: Any = torch.cuda._sleep
    wait(cycles)


def in_us(seconds: float) -> str:
    """Microseconds, for a table."""
    return f"{seconds * 1e6:.1f}"
