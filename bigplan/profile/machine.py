"""All probes on this machine, one after the other, within one budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bigplan.errors import InputError, PreflightError, WorkerError
from bigplan.profile.attention import measure_attention
from bigplan.profile.bench import DTYPES, Bench
from bigplan.profile.budget import ReadClock, TimeBudget
from bigplan.profile.collectives import measure_collectives, start_peers
from bigplan.profile.copies import measure_copies
from bigplan.profile.drive import measure_drive
from bigplan.profile.exchange import begin, end, multiplying
from bigplan.profile.gemm import measure_gemm
from bigplan.profile.host import measure_cpu_update, measure_device_update, measure_host
from bigplan.profile.load import Load, tokens_of_round
from bigplan.profile.memory import Use, busy, gpu_uses, measure_memory
from bigplan.profile.narrow import measure_narrow
from bigplan.profile.sensors import uuid_of
from bigplan.profile.stream import measure_launch, measure_stream
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.detect.cluster import OVERHEADS, detect
from bigplan.spec.detect.machine import (
    FoundGpu,
    available_cores,
    find_gpus,
    load_told,
    visible_gpus,
)
from bigplan.units import format_bytes, rounded

QUICK_SECONDS = 45.0  # of measuring; starting torch and CUDA takes the rest of a minute
THOROUGH_SECONDS = 280.0

ProbeFunction = Callable[[NodeGroup, Bench, float], NodeGroup]


@dataclass(frozen=True, slots=True)
class Probe:
    """One resource: its name for the progress line, its share of the time, what measures it.

    `measure` returns the node group with the figures that it replaced, each with its source. It
    may read figures of earlier probes. A `hot` probe is measured between rounds of load on a GPU,
    a `together` probe while the other devices compute on a CPU.
    """

    name: str
    weight: float
    measure: ProbeFunction
    hot: bool = False
    together: bool = False


def heat(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """Bring the GPU to its sustained state, for the hot probes; no figure changes."""
    assert bench.load is not None
    bench.load.heat(seconds, bench.clock)
    return group


# The order matters. Fitting products needs the rate of memory and the launch overhead; fitting
# attention needs the peak. Launches leave the GPU idle, so they are timed before it is heated.
HEAT = Probe("sustained load", 8, heat, hot=True)
COMPUTE = (
    Probe("kernel launches", 1, measure_launch, together=True),
    Probe("narrow layers", 2, measure_narrow, together=True),
    HEAT,
    Probe("device memory", 2, measure_stream, hot=True, together=True),
    Probe("matrix products", 14, measure_gemm, hot=True, together=True),
    Probe("attention", 6, measure_attention, hot=True, together=True),
)
COLLECTIVES = Probe("collectives", 6, measure_collectives)
PROBES = (
    *COMPUTE,
    Probe("copies", 6, measure_copies),
    Probe("host memory", 4, measure_host),
    Probe("AdamW on the CPU", 6, measure_cpu_update),
    Probe("AdamW on the device", 1, measure_device_update),
)
DRIVE = Probe("drive", 9, measure_drive)


@dataclass(frozen=True, slots=True)
class ProbeDone:
    """A finished probe: the group `before` and `after` it, and the `seconds` that it took."""

    name: str
    before: NodeGroup
    after: NodeGroup
    seconds: float


@dataclass(frozen=True, slots=True)
class Wish:
    """What to measure: all GPUs or `cpu_devices`, a drive's folder, for so many seconds."""

    name: str = "this-machine"
    folder: Path | None = None
    cpu_devices: int | None = None
    seconds: float = QUICK_SECONDS


@dataclass(frozen=True, slots=True)
class Profile:
    """The machine as descriptions have it, and as it was measured."""

    before: Cluster
    after: Cluster


def profile_machine(
    wish: Wish,
    tell: Callable[[ProbeDone], None],
    warn: Callable[[str], None],
    clock: ReadClock = time.perf_counter,
) -> Profile:
    """Measure this machine. Raises InputError.

    `warn` is called at once with what will spoil the figures, `tell` with every finished probe.
    """
    found = gpu_uses()  # before this process takes memory there
    devices = _devices(wish)
    before = _described(wish, devices)
    bench = _bench(before.group, devices, wish, clock)
    uses = [found.get(uuid_of(device), Use()) for device in devices] if bench.cuda else [Use()]
    for warning in _warnings(bench, uses):
        warn(warning)
    group = before.group
    with _accompanied(bench, group) as bench:
        for step in _measured(_probes(group, warn), group, bench, wish.seconds):
            tell(step)
            group = step.after
    group = measure_memory(_crowded(group, bench), bench, uses[0])
    after = before.model_copy(
        update={"node_groups": (group,), "description": f"{_what(group)}, measured"}
    )
    return Profile(before, after)


def measure_cpu_devices(cluster: Cluster, seconds: float = 8.0) -> Cluster:
    """A cluster of CPU devices with what torch reaches on them: compute and collectives."""
    group = cluster.group
    bench = _bench(group, (torch.device("cpu"),), Wish(seconds=seconds), time.perf_counter)
    probes = (*COMPUTE, COLLECTIVES) if group.gpus_per_node > 1 else COMPUTE
    with _accompanied(bench, group) as bench:
        for step in _measured(probes, group, bench, seconds):
            group = step.after
    return cluster.model_copy(update={"node_groups": (_crowded(group, bench),)})


def _probes(group: NodeGroup, warn: Callable[[str], None]) -> Iterator[Probe]:
    """The probes for what the machine has."""

    def collectives(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
        try:
            return COLLECTIVES.measure(group, bench, seconds)
        except WorkerError as error:
            warn(f"collectives were not measured, their figures stay as they were: {error}")
            return group

    yield from PROBES
    if group.gpus_per_node > 1:
        yield replace(COLLECTIVES, measure=collectives)
    if group.nvme is not None:
        yield DRIVE


@contextmanager
def _accompanied(bench: Bench, group: NodeGroup) -> Iterator[Bench]:
    """The bench, with a process for each device if these are several of one CPU."""
    if bench.cuda or group.gpus_per_node == 1:
        yield bench
        return
    with start_peers(group, bench) as peers:
        yield replace(bench, peers=peers)


@contextmanager
def _computing(bench: Bench) -> Iterator[None]:
    """Let all devices but the measured one compute, on the cores that are left.

    CPU devices share caches, memory, clocks and often cores, as two threads of one core do.
    """
    ranks = range(1, min(len(bench.peers), bench.cores // bench.threads)) if bench.peers else ()
    if not bench.peers or not ranks:
        yield
        return
    bench.peers.call_some(ranks, begin, multiplying)
    try:
        yield
    finally:
        bench.peers.call_some(ranks, end)


def _crowded(group: NodeGroup, bench: Bench) -> NodeGroup:
    """Figures of a CPU device where devices outnumber the cores and take turns on them.

    Each device was measured on a core of its own, while others computed on the other cores; in a
    run it has that core for a part of the time. (Copies and the host's update also have rates of
    the whole node.)
    """
    devices, cores, gpu = group.gpus_per_node, bench.cores, group.gpu
    if bench.cuda or devices <= cores:
        return group
    part = cores / devices
    values = {
        "peak_flops": {name: rounded(part * rate) for name, rate in gpu.peak_flops.items()},
        "memory_bandwidth": rounded(part * gpu.memory_bandwidth),
    } | {name: rounded(getattr(gpu, name) / part) for name in OVERHEADS}
    how = f"; for {devices} devices that take turns on {cores} core(s), "
    factors = dict.fromkeys(values, f"x {cores}/{devices}")
    factors |= dict.fromkeys(OVERHEADS, f"x {devices}/{cores}")
    sources = {name: gpu.sources[name] + how + factors[name] for name in values}
    return group.model_copy(update={"gpu": gpu.replaced(values, sources)})


def _bench(
    group: NodeGroup, devices: tuple[torch.device, ...], wish: Wish, clock: ReadClock
) -> Bench:
    cores = available_cores()
    threads = max(1, cores // group.gpus_per_node)
    bench = Bench(devices, cores, threads, wish.folder, wish.seconds <= QUICK_SECONDS, clock)
    if not bench.cuda:
        return bench
    precision = bench.precisions(group.gpu)[0]
    load = Load(bench.device, DTYPES[precision], tokens_of_round(group.gpu.peak(precision)))
    return replace(bench, load=load)


def _measured(
    probes: Iterable[Probe], group: NodeGroup, bench: Bench, seconds: float
) -> Iterator[ProbeDone]:
    probes = [probe for probe in probes if bench.cuda or probe is not HEAT]
    cold = replace(bench, load=None)
    budget = TimeBudget(seconds, bench.clock)
    waiting = sum(probe.weight for probe in probes)
    for probe in probes:
        start = bench.clock()
        allotted = budget.allot(probe.weight, waiting)
        waiting -= probe.weight
        measured = _measure(probe, group, bench if probe.hot else cold, allotted)
        yield ProbeDone(probe.name, group, measured, bench.clock() - start)
        group = measured


def _measure(probe: Probe, group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    if bench.cuda:
        torch.cuda.empty_cache()  # probes ask the device what is free
    try:
        with _computing(bench) if probe.together else nullcontext():
            return probe.measure(group, bench, seconds)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(bench.device)
        raise PreflightError(
            f"{bench.device} ran out of memory while measuring {probe.name}: {format_bytes(free)} "
            f"of {format_bytes(total)} are free; stop what else runs there and measure again"
        ) from error


def _devices(wish: Wish) -> tuple[torch.device, ...]:
    if wish.cpu_devices is not None or not torch.cuda.is_available():
        if wish.cpu_devices is None and (found := find_gpus()):
            raise InputError(
                f"nvidia-smi lists {len(found)} x {found[0].name}, but this torch "
                f"({torch.__version__}) sees no CUDA device; install a CUDA build of torch, or "
                "measure the cores with --cpu-devices 1"
            )
        return (torch.device("cpu"),)
    return tuple(torch.device("cuda", i) for i in range(torch.cuda.device_count()))


def _described(wish: Wish, devices: tuple[torch.device, ...]) -> Cluster:
    """What is known without measuring: datasheets, shipped descriptions, system reports."""
    gpus = None
    if devices[0].type == "cuda":
        gpus = visible_gpus()
        if len(gpus) != len(devices):  # there is no nvidia-smi, or these are parts of GPUs
            properties = [torch.cuda.get_device_properties(device) for device in devices]
            gpus = tuple(FoundGpu(p.name, p.total_memory, 0, 0) for p in properties)
        require_alike(gpus)
    cpus = wish.cpu_devices if gpus is not None else wish.cpu_devices or 1
    found = detect(cpus, wish.folder, drive=wish.folder is not None, gpus=gpus)
    return found.model_copy(update={"name": wish.name})


def require_alike(gpus: Sequence[FoundGpu]) -> None:
    """Raise InputError where GPUs differ: one of them is measured for all."""
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        raise InputError(
            f"this machine has {' and '.join(names)}, and one GPU is measured for all: name GPUs "
            "of one kind by CUDA_VISIBLE_DEVICES, or take `bigplan detect`, which counts unlike "
            "GPUs as the worst of them"
        )


def _warnings(bench: Bench, uses: list[Use]) -> Iterator[str]:
    if told := load_told(bench.cores):
        yield told
    for device, use in zip(bench.devices, uses, strict=True):
        if bench.cuda:
            _, total = torch.cuda.mem_get_info(device)
            if told := busy(device, use, total):
                yield told


def _what(group: NodeGroup) -> str:
    return f"{group.gpus_per_node} x {group.gpu.name}, {group.host.cores} cores"
