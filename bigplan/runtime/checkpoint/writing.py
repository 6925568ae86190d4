"""Files of a checkpoint on their way to disk: whole pages, several threads, checksums on the way.

zlib's CRC-32 releases the GIL and runs at 3.1 GB/s a thread, where a drive writes 2 (sha256 1.8,
blake2b 0.7). It finds damage by a drive or a cable, but no attack.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from torch import Tensor

from bigplan.mechanics import PAGE, TRANSFER_BYTES
from bigplan.runtime.manifest import BLOCK
from bigplan.runtime.memory.disk import Pages
from bigplan.runtime.memory.slab import align_up

Written = list[Future[list[int]]]


def block_sums(view: memoryview) -> list[int]:
    """CRC-32 of every block."""
    return [zlib.crc32(view[start : start + BLOCK]) for start in range(0, len(view), BLOCK)]


class FileWriter:
    """`nbytes` (whole pages) at `path`, reserved at once. Raises OSError wherever disk is short."""

    def __init__(self, path: Path, nbytes: int, pool: ThreadPoolExecutor) -> None:
        assert nbytes % PAGE == 0, nbytes
        self._pages = Pages.create(path)
        self._pool = pool
        try:
            os.posix_fallocate(self._pages.descriptor, 0, nbytes)
        except BaseException:
            self._pages.close()
            raise

    def write(self, offset: int, source: Tensor, nbytes: int) -> Written:
        """Start writing `nbytes` of `source`, page-aligned in host memory with room to a page.

        Only wait_for says when `source` may change; its checksums are those of `nbytes`.
        """
        view = source[: align_up(nbytes, PAGE)].numpy().data
        return [
            self._pool.submit(
                self._chunk, offset + start, view[start : start + TRANSFER_BYTES], nbytes - start
            )
            for start in range(0, nbytes, TRANSFER_BYTES)
        ]

    def _chunk(self, offset: int, view: memoryview, nbytes: int) -> list[int]:
        sums = block_sums(view[:nbytes])
        self._pages.move(offset, view, write=True)
        self._pages.forget(offset, len(view))
        return sums

    def finish(self) -> None:
        """Return once everything is on the medium; the file is closed in any case."""
        try:
            os.fsync(self._pages.descriptor)
        finally:
            self._pages.close()

    def abandon(self) -> None:
        """Close a file that is no longer needed."""
        self._pages.close()


def wait_for(written: Written) -> Iterator[int]:
    """Checksums, block after block. Raises the first error, when no thread works on it any more."""
    wait(written)
    for chunk in written:
        yield from chunk.result()
