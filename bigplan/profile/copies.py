"""Copies between page-locked host memory and devices: one way, both ways, all devices at once."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle

import torch
from torch import Tensor

from bigplan.mechanics import PAGE
from bigplan.profile.bench import Bench, source, threads
from bigplan.profile.budget import ReadClock
from bigplan.profile.fit import fit_transfer
from bigplan.profile.load import event
from bigplan.runtime.memory.slab import Arena, Slab
from bigplan.spec.cluster import NodeGroup
from bigplan.units import format_bandwidth, format_bytes, rounded

MiB = 2**20
SIZES = (MiB, 16 * MiB, 256 * MiB)
CPU_SIZES = (MiB // 4, MiB, 16 * MiB)
CHUNK = 64 * MiB  # bytes of one copy where a buffer is copied over and over
WAYS = ("host_to_device", "device_to_host")


@dataclass(slots=True)
class Copier:
    """One direction on one device; `source` and `target` are uint8 of equal length."""

    way: str
    device: torch.device
    source: Tensor
    target: Tensor
    stream: torch.cuda.Stream | None
    nbytes: int = 0  # copied so far in a window
    seconds: float = 0.0  # of that window

    @classmethod
    def of(cls, way: str, device: torch.device, host: Tensor, there: Tensor) -> Copier:
        """`way` is one of WAYS; a copier on CUDA has its own stream, as the runtime's lanes do."""
        stream = None
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        ends = (host, there) if way == "host_to_device" else (there, host)
        return cls(way, device, *ends, stream)

    def copy(self, nbytes: int, start: int = 0) -> None:
        """Copy, or queue a copy of, so many bytes from `start` on."""
        part = slice(start, start + nbytes)
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            self.target[part].copy_(self.source[part], non_blocking=True)

    def timed(self, nbytes: int, start: int, clock: ReadClock) -> Callable[[], float]:
        """Copy, or queue a copy; the function returned waits for its end and gives its seconds."""
        if self.stream is None:
            begin = clock()
            self.copy(nbytes, start)
            took = clock() - begin
            return lambda: took
        began, ended = event(), event()
        began.record(self.stream)
        self.copy(nbytes, start)
        ended.record(self.stream)

        def seconds() -> float:
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1e3

        return seconds

    def run(self, stop: threading.Event, clock: ReadClock) -> None:
        """Copy at least one chunk, then one after another, until `stop` is set; two are queued.

        On a busy machine a short window may be over before this thread begins.
        """
        begin, before = clock(), None
        for start, nbytes in _chunks(self.target.numel()):
            ended = self.timed(nbytes, start, clock)
            if before is not None:
                before()
            before = ended
            self.nbytes += nbytes
            if stop.is_set():
                break
        if before is not None:
            before()
        self.seconds = clock() - begin


def _chunks(whole: int) -> Iterator[tuple[int, int]]:
    """Start and length of a buffer's chunks, over and over."""
    return cycle([(start, min(CHUNK, whole - start)) for start in range(0, whole, CHUNK)])


@dataclass(frozen=True, slots=True)
class Passage:
    """Both directions of one device, copying as when optimizer state passes through the device.

    The next chunk comes once the last has arrived; the last leaves meanwhile
    (`runtime/execution/lanes.py`).
    """

    into: Copier
    off: Copier

    def run(self, stop: threading.Event, clock: ReadClock) -> None:
        """Pass at least one chunk.

        The seconds of `into` include the pauses between chunks, those of `off` only the copies.
        """
        into, off = self.into, self.off
        begin, leaving = clock(), list[Callable[[], float]]()
        for start, nbytes in _chunks(into.target.numel()):
            into.timed(nbytes, start, clock)()
            leaving.append(off.timed(nbytes, start, clock))
            into.nbytes += nbytes
            if stop.is_set():
                break
        into.seconds = clock() - begin
        off.nbytes, off.seconds = into.nbytes, sum(seconds() for seconds in leaving)


@dataclass(slots=True)
class CopyRates:
    """Bytes/s by direction, of all devices together, once the window is over."""

    rates: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Bytes/s of both directions."""
        return sum(self.rates.values())


@contextmanager
def copying(
    copiers: Sequence[Copier], clock: ReadClock, *, passing: bool = False
) -> Iterator[CopyRates]:
    """Let all copiers copy for the length of the block; `passing` joins pairs as passages."""
    stop, reached, errors = threading.Event(), CopyRates(), []
    tasks: Sequence[Copier | Passage] = copiers
    if passing:
        tasks = [Passage(*pair) for pair in zip(copiers[::2], copiers[1::2], strict=True)]

    def run(task: Copier | Passage) -> None:
        try:
            task.run(stop, clock)
        except RuntimeError as error:  # torch's errors, raised again in the caller's thread
            errors.append(error)

    for copier in copiers:
        copier.nbytes = 0
    workers = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for worker in workers:
        worker.start()
    try:
        yield reached
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    if errors:
        raise errors[0]
    rates: dict[str, float] = defaultdict(float)
    for copier in copiers:
        rates[copier.way] += copier.nbytes / copier.seconds
    reached.rates = dict(rates)


@contextmanager
def copiers_of(bench: Bench, nbytes: int) -> Iterator[list[Copier]]:
    """A copier into and one out of every device, each with `nbytes` in whole pages."""
    nbytes = nbytes // PAGE * PAGE
    slab = Slab(2 * nbytes * len(bench.devices), pinned=bench.cuda)
    try:
        yield [
            Copier.of(way, device, slab.take(nbytes), arena.take(nbytes))
            for device in bench.devices
            for arena in [Arena(2 * nbytes, device)]
            for way in WAYS
        ]
    finally:
        if bench.cuda:
            for device in bench.devices:
                torch.cuda.synchronize(device)
        slab.close()


def measure_copies(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """Measure `pcie`: rates alone, both ways and of all devices together, and the latency."""
    wanted = SIZES if bench.cuda else CPU_SIZES
    largest = min(wanted[-1], bench.host_memory() // (2 * len(bench.devices)))
    sizes = tuple(size for size in wanted if size <= largest) or (largest,)
    with threads(bench.threads), copiers_of(bench, sizes[-1]) as copiers:
        values, sources = _one_way(copiers[:2], sizes, bench, seconds / 2)
        # Copies queued one after the other may hide all latency, but each one has to be launched.
        values["latency"] = max(values["latency"], group.gpu.launch_overhead)
        together = _together(copiers[:2], bench, seconds / 6)
        values["both_ways"] = rounded(together.total)
        sources["both_ways"] = source(f"{by_way(together)} at once")
        nodes, told = _of_node(copiers, values, bench, seconds / 3)
    if bench.cuda:
        torch.cuda.empty_cache()
    pcie = group.pcie.replaced(values | nodes, sources | told)
    return group.model_copy(update={"pcie": pcie})


def _one_way(
    copiers: Sequence[Copier], sizes: Sequence[int], bench: Bench, seconds: float
) -> tuple[dict[str, float], dict[str, str]]:
    values: dict[str, float] = {}
    sources, latencies = {}, []
    locked = "page-locked, " if bench.cuda else "within host memory, "
    for copier in copiers:
        each = seconds / len(copiers) / len(sizes)
        times = [_seconds(copier, size, bench, each) for size in sizes]
        values[copier.way] = rounded(sizes[-1] / times[-1])
        reached = ", ".join(
            f"{format_bytes(size)} at {format_bandwidth(rounded(size / took))}"
            for size, took in zip(sizes, times, strict=True)
        )
        sources[copier.way] = source(locked + reached)
        latencies.append(fit_transfer(sizes, times).latency if len(sizes) > 1 else 0.0)
    values["latency"] = float(f"{max(latencies):.2g}")
    ends = f"{format_bytes(sizes[0])} to {format_bytes(sizes[-1])}"
    sources["latency"] = source(f"of copies of {ends} beside their bytes, a launch at least")
    return values, sources


def _seconds(copier: Copier, nbytes: int, bench: Bench, seconds: float) -> float:
    """Median of one copy among others on its stream."""
    with torch.cuda.stream(copier.stream) if copier.stream else nullcontext():
        return bench.median(lambda: copier.copy(nbytes), seconds)


def _together(copiers: Sequence[Copier], bench: Bench, seconds: float) -> CopyRates:
    with copying(copiers, bench.clock) as reached:
        threading.Event().wait(seconds)
    return reached


def _of_node(
    copiers: Sequence[Copier], alone: dict[str, float], bench: Bench, seconds: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Rates of all devices together: one way, the other way, and both ways at once.

    On a CPU all cores copy for one device: more devices would share the same memory.
    """
    values: dict[str, float] = {}
    sources: dict[str, str] = {}
    if len(bench.devices) == 1 and bench.cuda:
        for way in WAYS:
            values[f"node_{way}"] = alone[way]
        values["node_both_ways"] = alone["both_ways"]
        return values, dict.fromkeys(values, source("the node has one GPU"))
    for way in WAYS:
        name, some = f"node_{way}", [copier for copier in copiers if copier.way == way]
        with threads(bench.cores):
            values[name] = rounded(_together(some, bench, seconds / 3).total)
        who = f"{len(bench.devices)} GPUs" if bench.cuda else f"{bench.cores} cores"
        sources[name] = source(f"{who} copying at once")
    if not bench.cuda:
        return values, sources
    both = _together(copiers, bench, seconds / 3)
    values["node_both_ways"] = rounded(both.total)
    sources["node_both_ways"] = source(f"{len(bench.devices)} devices, {by_way(both)}")
    return values, sources


def by_way(reached: CopyRates) -> str:
    """Rates by direction, worded for a source."""
    parts = (
        f"{way.replace('_', ' ')} {format_bandwidth(rounded(rate))}"
        for way, rate in reached.rates.items()
    )
    return ", ".join(parts)
