"""The program's buffers on this machine: device arena, host slab, disk file, allocated once.

Static buffers (parameters, gradients, optimizer state, slots, staging, offloaded activations) are
bytes at fixed places. Tensors that autograd makes on the device (hidden states, saved activations)
come from torch's allocator and are kept by entry; the plan's ring sizes bound how many live.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bigplan.errors import PreflightError
from bigplan.mechanics import ALIGNMENT, PAGE
from bigplan.placement import Tier
from bigplan.program import Buffer, Program
from bigplan.runtime.memory.disk import DiskFile
from bigplan.runtime.memory.slab import (
    Arena,
    Slab,
    align_up,
    apart,
    available_disk,
    available_host_memory,
)
from bigplan.units import counted, format_bytes

Key = tuple[str, int]
POISON = 0xFF  # a NaN in bf16, fp16 and fp32, wherever it is read


@dataclass(frozen=True, slots=True)
class AllocationSizes:
    """Bytes of the static buffers on each tier, padded as they are placed."""

    device: int
    host: int
    disk: int


def static_sizes(program: Program) -> AllocationSizes:
    """What `Memory` allocates for a program."""
    sizes = {Tier.GPU: 0, Tier.HOST: 0, Tier.NVME: 0}
    for region in _regions(program.buffers):
        sizes[region[0].tier] += _region_bytes(region)
    return AllocationSizes(sizes[Tier.GPU], sizes[Tier.HOST], sizes[Tier.NVME])


def rounding(program: Program) -> AllocationSizes:
    """Bytes of them that no buffer asked for, because every entry begins on a new page."""
    sizes, asked = static_sizes(program), {Tier.GPU: 0, Tier.HOST: 0, Tier.NVME: 0}
    for region in _regions(program.buffers):
        asked[region[0].tier] += max(buffer.count * buffer.nbytes for buffer in region)
    return AllocationSizes(
        sizes.device - asked[Tier.GPU], sizes.host - asked[Tier.HOST], sizes.disk - asked[Tier.NVME]
    )


def _regions(buffers: Mapping[str, Buffer]) -> Iterable[list[Buffer]]:
    """The static buffers, each with those that begin where it does."""
    regions: dict[str, list[Buffer]] = {}
    for buffer in buffers.values():
        if not buffer.dynamic:
            regions.setdefault(buffer.within or buffer.name, []).append(buffer)
    return regions.values()


def _region_bytes(region: Iterable[Buffer]) -> int:
    return max(buffer.count * _entry_bytes(buffer) for buffer in region)


def _entries(region: Iterable[Buffer]) -> Iterator[tuple[Key, int]]:
    """All entries with the bytes before them."""
    for buffer in region:
        for i in range(buffer.count):
            yield (buffer.name, i), i * _entry_bytes(buffer)


def _entry_bytes(buffer: Buffer) -> int:
    """Bytes from one entry to the next."""
    return align_up(buffer.nbytes, ALIGNMENT if buffer.tier is Tier.GPU else PAGE)


def check_machine(sizes: AllocationSizes, device: torch.device, scratch: Path, ranks: int) -> None:
    """Raise PreflightError where `ranks` equal ranks of this machine do not fit it."""
    host = sizes.host + (sizes.device if device.type == "cpu" else 0)
    _check("host memory", host * ranks, available_host_memory(), ranks)
    if sizes.disk:
        _check(f"disk space at {scratch}", sizes.disk * ranks, available_disk(scratch), ranks)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        _check(f"memory on {device}", sizes.device, free, 1)


def _check(what: str, needed: int, available: int, ranks: int) -> None:
    if needed > available:
        raise PreflightError(
            f"the plan needs {format_bytes(needed)} of {what} for {counted(ranks, 'rank')} here, "
            f"and {format_bytes(available)} is available; free some, or plan again with a --cap"
        )


class Memory:
    """Places of all buffers of one rank; those of the device in `pool`, if there is one."""

    def __init__(
        self,
        program: Program,
        device: torch.device,
        scratch: Path,
        pool: torch.cuda.MemPool | None = None,
    ) -> None:
        self.device = device
        self.buffers: Mapping[str, Buffer] = program.buffers
        self.sizes = static_sizes(program)
        self.arena = Arena(self.sizes.device, device, pool)
        self.slab = Slab(self.sizes.host, pinned=device.type == "cuda")
        self.disk = DiskFile(scratch, self.sizes.disk) if self.sizes.disk else None
        self.dynamic: dict[Key, object] = {}
        # Storages of activations that leave. They stay with the entry of the ring until a forward
        # pass writes that entry again; by then the compute stream has waited for the copy.
        self.storages: dict[Key, list[Tensor]] = {}
        self._places: dict[Key, Tensor] = {}
        self._views: dict[tuple[Key, torch.dtype, int, int], Tensor] = {}
        self._extents: dict[Key, int] = {}
        end = 0
        for region in _regions(self.buffers):
            tier, size = region[0].tier, _region_bytes(region)
            if tier is Tier.NVME:
                self._extents.update((key, end + start) for key, start in _entries(region))
                end += size
                continue
            taken = (self.arena if tier is Tier.GPU else self.slab).take(size)
            for key, start in _entries(region):
                nbytes = _entry_bytes(self.buffers[key[0]])
                self._places[key] = apart(taken[start : start + nbytes])

    def place(self, key: Key) -> Tensor:
        """The entry's bytes in device or host memory, padding included."""
        return self._places[key]

    def view(self, key: Key, dtype: torch.dtype, elements: int, start: int = 0) -> Tensor:
        """1-D [elements], from byte `start` of the entry on; one tensor however often it is asked.

        Every call of torch lets other threads have the interpreter, and then waits for it.
        """
        name = key, dtype, elements, start
        if name not in self._views:
            end = start + elements * dtype.itemsize
            self._views[name] = self._places[key][start:end].view(dtype)
        return self._views[name]

    def on_disk(self, key: Key) -> bool:
        """Whether the entry is an extent of the disk file."""
        return key in self._extents

    def read(self, key: Key, into: Tensor, start: int = 0) -> None:
        """An extent from byte `start` on to host memory, whole pages; the shorter of both."""
        into = into[: self._moved(key, into, start)]
        if len(into):  # a head without parameters may be all on the drive, which has no file then
            assert self.disk is not None
            self.disk.read(self._extents[key] + start, into)

    def write(self, key: Key, source: Tensor) -> None:
        """Host memory to an extent, whole pages; the shorter of both."""
        source = source[: self._moved(key, source)]
        if len(source):
            assert self.disk is not None
            self.disk.write(self._extents[key], source)

    def _moved(self, key: Key, tensor: Tensor, start: int = 0) -> int:
        return min(align_up(self.buffers[key[0]].nbytes, PAGE) - start, tensor.numel())

    def poison(self, key: Key) -> None:
        """Fill a static entry in memory with NaNs, so that a later read shows itself."""
        if key in self._places:
            self._places[key].fill_(POISON)

    def poison_all(self) -> None:
        """Fill every static entry with NaNs."""
        for key in self._places:
            self.poison(key)

    def close(self) -> None:
        """Give everything back."""
        self.dynamic.clear()
        self.storages.clear()
        self._places.clear()
        self._views.clear()
        self.arena.close()
        self.slab.close()
        if self.disk is not None:
            self.disk.close()
