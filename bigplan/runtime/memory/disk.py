"""One preallocated file per process and NVMe device, read and written around the page cache.

O_DIRECT keeps the promise of host memory: a page cache full of optimizer state is memory that the
plan did not grant. On the drives that were measured it was as fast as DeepSpeed's async_io, and it
needs no compiler. Offsets, lengths and addresses are multiples of 4 KiB.
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bigplan.errors import BigplanError, PreflightError
from bigplan.mechanics import DISK_THREADS, PAGE, TRANSFER_BYTES
from bigplan.runtime.memory.slab import available_disk


class TransferError(BigplanError, OSError):
    """A read or write failed or came short; the message names the file, offset and bytes."""


@dataclass(frozen=True, slots=True)
class Pages:
    """An open file that is moved in whole pages; `direct`: around the page cache."""

    path: Path
    descriptor: int
    direct: bool

    @classmethod
    def create(cls, path: Path) -> Pages:
        """A new, empty file."""
        return cls(path, *_create(path))

    @classmethod
    def open(cls, path: Path) -> Pages:
        """A file to read. Raises OSError where it cannot be opened."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            descriptor, direct = os.open(path, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return cls(path, os.open(path, flags), False)
        if not _reads_directly(descriptor):
            os.close(descriptor)
            descriptor, direct = os.open(path, flags), False
        return cls(path, descriptor, direct)

    def move(self, offset: int, view: memoryview, *, write: bool) -> None:
        """Fill, or write, `view` however many calls it takes. Raises TransferError."""
        done = 0
        while done < len(view):
            # O_DIRECT accepts only whole pages, so a short transfer is resumed at the last one.
            start = done - done % PAGE
            at, rest = offset + start, view[start:]
            verb = "writing" if write else "reading"
            what = f"{self.path}: {verb} {len(rest)} bytes at offset {at}"
            try:
                if write:
                    moved = os.pwritev(self.descriptor, [rest], at)
                else:
                    moved = os.preadv(self.descriptor, [rest], at)
            except OSError as error:
                raise TransferError(error.errno, f"{what}: {error.strerror}") from error
            if start + moved <= done:
                raise TransferError(f"{what}: {moved} bytes moved")
            done = start + moved

    def forget(self, offset: int, nbytes: int) -> None:
        """Take what was moved out of the page cache: host memory that no plan has granted."""
        if not self.direct:
            os.fdatasync(self.descriptor)  # only clean pages can go
            os.posix_fadvise(self.descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


class DiskFile:
    """`size` bytes of a disk, allocated at once at `path`, whose name is gone when it is there.

    So the bytes are free again however the process ends, be it killed.
    `direct` says whether the page cache is bypassed: file systems without O_DIRECT (tmpfs on
    older kernels, some network mounts) are read and written buffered, and the caller says so.
    `read` and `write` may be called from several threads. What is one chunk is moved by the thread
    that calls; the chunks of longer transfers share `threads` threads.

    Raises PreflightError when the disk has less than `size` bytes left.
    """

    def __init__(self, path: Path, size: int, threads: int = DISK_THREADS) -> None:
        assert size % PAGE == 0 and threads > 0, (size, threads)
        self.path = path
        self.size = size
        self._pages = Pages.create(path)
        self.direct = self._pages.direct
        self._open = True
        try:
            _allocate(self._pages.descriptor, path, size)
        except BaseException:
            self._pages.close()
            raise
        finally:
            path.unlink()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="disk")

    def read(self, offset: int, into: Tensor) -> None:
        """Fill `into` (uint8 [n] on CPU, page-aligned) from `offset`; returns when it is there."""
        self._transfer(offset, into, write=False)

    def write(self, offset: int, source: Tensor) -> None:
        """Write `source` (uint8 [n] on CPU, page-aligned) at `offset`; returns when accepted.

        It is not flushed to the medium: this file holds a running step's working state, and
        checkpoints are other files.
        """
        self._transfer(offset, source, write=True)

    def close(self) -> None:
        """Wait for the transfers under way and give the bytes back. May be called again."""
        if not self._open:
            return
        self._open = False
        self._pool.shutdown()
        self._pages.close()

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _transfer(self, offset: int, tensor: Tensor, write: bool) -> None:
        self._check(offset, tensor)
        view = tensor.detach().numpy().data
        if len(view) <= TRANSFER_BYTES:  # another thread's turn takes longer than a small chunk
            self._pages.move(offset, view, write=write)
            return
        chunks = [
            self._pool.submit(
                self._pages.move, offset + start, view[start : start + TRANSFER_BYTES], write=write
            )
            for start in range(0, len(view), TRANSFER_BYTES)
        ]
        _finish(chunks)

    def _check(self, offset: int, tensor: Tensor) -> None:
        assert self._open, f"{self.path} is closed"
        assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()
        assert tensor.device.type == "cpu", tensor.device
        length, address = tensor.numel(), tensor.data_ptr()
        # Asserted without O_DIRECT too: a caller's error must not depend on the file system.
        assert offset % PAGE == 0 and length % PAGE == 0 and address % PAGE == 0, (
            f"{self.path}: offset {offset}, length {length}, address {address:#x} "
            f"must be multiples of {PAGE}"
        )
        assert offset >= 0 and offset + length <= self.size, (
            f"{self.path}: {length} bytes at offset {offset} pass its end at {self.size}"
        )


def _finish(chunks: list[Future[None]]) -> None:
    """Wait for all, then raise the first error: no thread may touch the buffer afterwards."""
    wait(chunks)
    for chunk in chunks:
        chunk.result()


def _create(path: Path) -> tuple[int, bool]:
    """A new file's descriptor and whether it is O_DIRECT, proved by reading a page.

    Some file systems (overlay, FUSE) accept the flag in open and refuse the transfer.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False
    try:
        with mmap.mmap(-1, PAGE) as page:
            os.pwritev(descriptor, [page], 0)
            os.preadv(descriptor, [page], 0)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False
    os.ftruncate(descriptor, 0)
    return descriptor, True


def _reads_directly(descriptor: int) -> bool:
    try:
        with mmap.mmap(-1, PAGE) as page:
            os.preadv(descriptor, [page], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _allocate(descriptor: int, path: Path, size: int) -> None:
    """Reserve `size` bytes, so that no write of a later step can find the disk full."""
    available = available_disk(path.parent)
    try:
        if size > 0:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise PreflightError(
            f"{path.parent} has {available} bytes free, the plan needs {size}: "
            "free some, name another folder, or plan again with --cap nvme=SIZE"
        ) from error
