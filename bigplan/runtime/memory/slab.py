"""Fixed memory: one slab of host memory and one arena of device memory per process.

Both are allocated once, before the first step, at the size that the plan promised, and handed
out by a bump pointer. Nothing is ever returned to them: what reuses memory within a step (slots)
is decided by the plan, not by an allocator at run time.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import DistBackendError

from bigplan.errors import PreflightError
from bigplan.mechanics import ALIGNMENT, PAGE

TOUCHED_AT_ONCE = 64 << 20


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def aligned_empty(nbytes: int) -> Tensor:
    """A page-aligned uint8 CPU tensor [nbytes] on its own private anonymous mapping.

    The mapping is returned to the system when the last view of the tensor goes. It is private:
    Python's default, a shared anonymous mapping, is counted as shmem and never gets huge pages.
    It asks for those: touching and page-locking 12 GiB took 0.5 s with them and 16 threads, 6.0 s
    without (H200 machine, 2026-11-21).

    Raises PreflightError when the address space or the overcommit limit has no room.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise PreflightError(
            f"cannot map {nbytes} bytes of host memory ({error}); "
            f"{available_host_memory()} bytes are available: plan again with --cap host=SIZE"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def touch(buffer: Tensor) -> None:
    """Write one byte of every page of `buffer` (uint8), by all cores: the kernel zeroes them."""
    parts = torch.split(buffer, TOUCHED_AT_ONCE)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda part: part[::PAGE].zero_(), parts))


def typed(buffer: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The first bytes of `buffer` (uint8 [n]) seen as a contiguous `dtype` tensor of `shape`.

    Shares memory with `buffer`; asserts that the bytes are there.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    assert buffer.dtype == torch.uint8 and buffer.dim() == 1, (buffer.dtype, buffer.shape)
    assert nbytes <= buffer.numel(), f"{list(shape)} {dtype} needs {nbytes} of {buffer.numel()} B"
    return buffer[:nbytes].view(dtype).view(list(shape))


def apart(piece: Tensor) -> Tensor:
    """The same bytes with a version counter of their own.

    Pieces are written from several threads, and autograd would take one lane's copy for a change of
    another lane's tensor.
    """
    return piece.data


class _Bump:
    """A buffer handed out from its start; `label` names it when it overflows."""

    def __init__(self, buffer: Tensor, label: str) -> None:
        self._buffer: Tensor | None = buffer
        self._label = label
        self.size = buffer.numel()
        self.used = 0

    @property
    def buffer(self) -> Tensor:
        """All of the memory, uint8 [size]; asserts that it is not closed."""
        assert self._buffer is not None, f"{self._label} is closed"
        return self._buffer

    def take(self, nbytes: int, align: int) -> Tensor:
        """uint8 [nbytes] at the next multiple of `align`; AssertionError past the end."""
        start = align_up(self.used, align)
        assert nbytes >= 0 and start + nbytes <= self.size, (
            f"{self._label}: {nbytes} bytes at offset {start} pass the declared {self.size}: "
            "the plan's sizes and the runtime's packing disagree"
        )
        self.used = start + nbytes
        return apart(self.buffer[start : start + nbytes])

    def close(self) -> None:
        """Drop the buffer; the memory goes when no view of it is left. May be called again."""
        self._buffer = None


class Slab(_Bump):
    """`nbytes` of page-aligned host memory, page-locked for CUDA when `pinned`.

    One anonymous mapping with cudaHostRegister, not torch's pinned allocator, which rounds
    every block up to a power of two (20.4 GiB became 32). Every page is touched here, so that a
    machine without the memory fails now and not in the middle of the first step.

    Raises PreflightError when the mapping or the page-locking is refused.
    """

    def __init__(self, nbytes: int, pinned: bool) -> None:
        super().__init__(aligned_empty(nbytes), "host slab")
        self.pinned = pinned and nbytes > 0
        touch(self.buffer)
        if self.pinned:
            _register(self.buffer)

    def take(self, nbytes: int, align: int = PAGE) -> Tensor:
        """uint8 [nbytes] at the next multiple of `align`; AssertionError past the end."""
        return super().take(nbytes, align)

    def close(self) -> None:
        """Release the page lock and drop the buffer: copies through it must have finished."""
        if self.pinned and self._buffer is not None:
            _unregister(self._buffer)
        super().close()


class Arena(_Bump):
    """`nbytes` on a torch device, in one allocation; on "cpu" it stands in for a GPU's memory.

    `pool`: of a GPU's memory, where it shall come from. Raises PreflightError when the device has
    no room.
    """

    def __init__(
        self, nbytes: int, device: torch.device | str, pool: torch.cuda.MemPool | None = None
    ) -> None:
        self.device = torch.device(device)
        with nullcontext() if pool is None else torch.cuda.use_mem_pool(pool, self.device):
            buffer = _device_buffer(nbytes, self.device)
        super().__init__(buffer, f"arena on {self.device}")

    def take(self, nbytes: int, align: int = ALIGNMENT) -> Tensor:
        """uint8 [nbytes] at the next multiple of `align`; AssertionError past the end."""
        return super().take(nbytes, align)


def _device_buffer(nbytes: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return aligned_empty(nbytes)
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (torch.OutOfMemoryError, DistBackendError) as error:  # torch's allocator, or NCCL's
        free, total = torch.cuda.mem_get_info(device)
        raise PreflightError(
            f"{device} has {free} of {total} bytes free, the plan needs an arena of {nbytes}: "
            "plan again with --cap gpu=SIZE"
        ) from error


def _register(buffer: Tensor) -> None:
    """Page-lock and map `buffer` for every CUDA context of the process (flags 0)."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
    if status != 0:
        raise PreflightError(
            f"cudaHostRegister refused {buffer.numel()} bytes of host memory (CUDA error "
            f"{status}); {available_host_memory()} bytes are available: raise the locked-memory "
            "limit (ulimit -l) or plan again with --cap host=SIZE"
        )


def _unregister(buffer: Tensor) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cudart.cudaHostUnregister(buffer.data_ptr()))
    assert status == 0, f"cudaHostUnregister: CUDA error {status}"


def available_host_memory(declared: int | None = None) -> int:
    """Bytes of host memory that this process can still take.

    The smaller of the machine's MemAvailable and what every enclosing cgroup (v1 or v2) leaves.
    `declared` replaces MemTotal: some virtual machines grow their memory only when it is asked
    for, and show a fraction of it before that.
    """
    meminfo = _meminfo(Path("/proc/meminfo"))
    available = meminfo["MemAvailable"]
    if declared is not None:
        available = declared - (meminfo["MemTotal"] - available)
    return max(0, min([available, *_cgroup_headroom(Path("/proc/self/cgroup"))]))


def available_disk(path: Path) -> int:
    """Bytes that an unprivileged process can still write to the file system of folder `path`."""
    return shutil.disk_usage(path).free


def _meminfo(path: Path) -> dict[str, int]:
    """/proc/meminfo in bytes (the kernel prints KiB)."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in lines}


def _cgroup_headroom(membership: Path, mount: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """What each memory cgroup that holds the process leaves, from its own up to the root.

    The page cache that the kernel would drop first (inactive_file) counts as free, as it does
    in MemAvailable.
    """
    if not membership.exists():  # not Linux, or a kernel without cgroups: nothing limits us
        return
    for line in membership.read_text().splitlines():
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit = mount / "memory", "memory.limit_in_bytes"
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / inside.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            yield from _group_headroom(folder, limit, usage, cache)


def _group_headroom(folder: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    if not (folder / limit).exists():  # the root group has none; containers may hide parents
        return
    text = (folder / limit).read_text().strip()
    if text == "max":
        return
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    used = int((folder / usage).read_text()) - int(statistics.get(cache, "0"))
    yield int(text) - used
