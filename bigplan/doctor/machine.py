"""Memory, cores and the limits of processes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from bigplan.doctor.finding import Finding
from bigplan.spec.detect.machine import available_cores, available_memory, cpu_name
from bigplan.units import counted, format_bytes

TOPIC = "machine"
FEW_FILES = 4096  # open files that the hard limit should allow, as Ray asks for
LITTLE_SHARED = 1 << 30  # bytes: NCCL's ranks of a node take tens of MiB each, Ray's store 128 MiB
LITTLE_LOCKED = 1 << 30  # bytes; locked tensors have gigabytes
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SHARED = Path("/dev/shm")


def examine() -> Iterator[Finding]:
    """Memory, cores and limits."""
    yield Finding(
        TOPIC,
        "CPU",
        "good",
        f"{counted(available_cores(), 'core')} of {cpu_name()}, "
        f"{format_bytes(available_memory())} of memory free for training",
    )
    yield huge_pages(_HUGE_PAGES)
    yield shared_memory(_SHARED)
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def huge_pages(setting: Path) -> Finding:
    """Whether host memory may have huge pages: page-locking takes a tenth of the time with them."""
    try:
        chosen = setting.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except OSError:
        return Finding(TOPIC, "huge pages", "note", "the kernel does not say whether it has them")
    if chosen in ("always", "madvise"):
        return Finding(TOPIC, "huge pages", "good", f"{chosen}: host memory gets them")
    return Finding(
        TOPIC,
        "huge pages",
        "note",
        "never: page-locking 12 GiB took 6.0 s without them, 0.5 s with them",
        f"as root: echo madvise > {setting}",
    )


def shared_memory(folder: Path) -> Finding:
    """Room in shared memory, through which ranks of a node and Ray talk."""
    try:
        state = os.statvfs(folder)
    except OSError as error:
        told = f"{folder}: {error.strerror}"
        return Finding(TOPIC, "shared memory", "bad", told, f"mount a tmpfs at {folder}")
    free = state.f_bavail * state.f_frsize
    if free >= LITTLE_SHARED:
        return Finding(TOPIC, "shared memory", "good", f"{format_bytes(free)} free in {folder}")
    return Finding(
        TOPIC,
        "shared memory",
        "note",
        f"{format_bytes(free)} free in {folder}: NCCL fails where it runs out",
        "give a container --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm)",
    )


def locked_memory(limit: int) -> Finding:
    """How much a process may lock with the kernel's mlock."""
    if limit == resource.RLIM_INFINITY or limit >= LITTLE_LOCKED:
        told = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
        return Finding(TOPIC, "memlock", "good", told)
    return Finding(
        TOPIC,
        "memlock",
        "note",
        f"{format_bytes(limit)}: NCCL over InfiniBand, and DeepSpeed where it page-locks by "
        "itself, fail beyond that; CUDA's own page-locking is not counted by most drivers",
        "ulimit -l unlimited (a container: --ulimit memlock=-1; a service: LimitMEMLOCK=infinity)",
    )


def open_files(limit: int) -> Finding:
    """The most files that processes may open: each of Ray's has a socket to every other."""
    if limit == resource.RLIM_INFINITY or limit >= FEW_FILES:
        told = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
        return Finding(TOPIC, "open files", "good", told)
    return Finding(
        TOPIC,
        "open files",
        "note",
        f"{limit:,}: Ray fails where a large launch runs out of them",
        f"ulimit -n {FEW_FILES * 2} (a container: --ulimit nofile={FEW_FILES * 2})",
    )
