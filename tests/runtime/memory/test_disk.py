"""Disk files: what is written comes back, in pieces, from threads, after short transfers."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from bigplan.errors import PreflightError
from bigplan.mechanics import PAGE
from bigplan.runtime.memory import disk
from bigplan.runtime.memory.disk import DiskFile, TransferError
from bigplan.runtime.memory.slab import aligned_empty
from tests.examples import examples

PAGES = 64


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "TRANSFER_BYTES", 4 * PAGE)


@pytest.fixture(scope="module")
def shared_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskFile]:
    with DiskFile(tmp_path_factory.mktemp("disk") / "store", PAGES * PAGE) as file:
        file.write(0, aligned_empty(PAGES * PAGE).zero_())
        yield file


def _random(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return aligned_empty(nbytes).random_(0, 256, generator=generator)


EXTENT = st.tuples(st.integers(0, PAGES - 1), st.integers(0, PAGES)).map(
    lambda pair: (pair[0], min(pair[1], PAGES - pair[0]))
)


@settings(max_examples=examples(25))
@given(writes=st.lists(EXTENT, max_size=5), read=EXTENT, seed=st.integers(0, 2**32))
def test_reads_return_the_latest_writes(
    shared_file: DiskFile, writes: list[tuple[int, int]], read: tuple[int, int], seed: int
) -> None:
    expected = aligned_empty(PAGES * PAGE)
    shared_file.read(0, expected)
    for number, (start, length) in enumerate(writes):
        data = _random(length * PAGE, seed + number)
        shared_file.write(start * PAGE, data)
        expected[start * PAGE : (start + length) * PAGE] = data
    start, length = read
    into = aligned_empty(length * PAGE).fill_(255)
    shared_file.read(start * PAGE, into)
    assert torch.equal(into, expected[start * PAGE : (start + length) * PAGE])


def test_several_threads_share_a_file(shared_file: DiskFile) -> None:
    def round_trip(number: int) -> bool:
        data = _random(8 * PAGE, number)
        into = aligned_empty(8 * PAGE)
        for _ in range(5):
            shared_file.write(number * 8 * PAGE, data)
            shared_file.read(number * 8 * PAGE, into.zero_())
        return torch.equal(data, into)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, range(8)))


def test_the_bytes_are_allocated_at_once_and_nobody_has_to_remove_them(tmp_path: Path) -> None:
    file = DiskFile(tmp_path / "store", 256 * PAGE)
    (opened,) = [
        Path(link).stat()
        for link in Path("/proc/self/fd").iterdir()
        if os.path.realpath(link).startswith(str(file.path))
    ]
    assert opened.st_size == 256 * PAGE
    assert opened.st_blocks * 512 >= 256 * PAGE
    assert not list(tmp_path.iterdir())
    file.close()
    file.close()
    with pytest.raises(AssertionError, match="closed"):
        file.read(0, aligned_empty(PAGE))


def test_an_empty_file_is_a_file(tmp_path: Path) -> None:
    with DiskFile(tmp_path / "store", 0) as file:
        file.write(0, aligned_empty(0))
        assert file.size == 0


def test_without_direct_the_file_is_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    real = os.open
    monkeypatch.setattr(os, "open", refuse)
    with DiskFile(tmp_path / "store", 8 * PAGE) as file:
        assert not file.direct
        data, into = _random(8 * PAGE, 1), aligned_empty(8 * PAGE)
        file.write(0, data)
        file.read(0, into)
        assert torch.equal(data, into)


@pytest.mark.parametrize("limit", [PAGE, 3 * PAGE + 5, 5000])
def test_short_transfers_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    read, write = os.preadv, os.pwritev

    def page_part(n: int) -> int:  # O_DIRECT itself moves whole pages; the rest is overwritten
        return max(PAGE, n - n % PAGE)

    def part(views: list[mmap.mmap | memoryview]) -> list[memoryview]:
        # A view, not a slice: of an mmap that is a copy, which nothing can be read into.
        return [memoryview(views[0])[: page_part(limit)]]

    monkeypatch.setattr(os, "preadv", lambda fd, views, at: min(limit, read(fd, part(views), at)))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, part(views), at))
    with DiskFile(tmp_path / "store", 16 * PAGE, threads=2) as file:
        data, into = _random(16 * PAGE, 2), aligned_empty(16 * PAGE).zero_()
        file.write(0, data)
        file.read(0, into)
        assert torch.equal(data, into)


def test_a_full_disk_is_refused_with_both_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(disk, "available_disk", lambda path: 12_345)
    with pytest.raises(PreflightError, match=rf"12345 .* {4 * PAGE}\b.*--cap nvme"):
        DiskFile(tmp_path / "store", 4 * PAGE)
    assert list(tmp_path.iterdir()) == []


def test_errors_name_file_offset_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, views: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with DiskFile(tmp_path / "store", 8 * PAGE) as file:
        monkeypatch.setattr(os, "pwritev", broken)
        told = "store: writing 8192 bytes at offset 4096: .*Input/output error"
        with pytest.raises(TransferError, match=told):
            file.write(PAGE, aligned_empty(2 * PAGE))
        os.ftruncate(file._pages.descriptor, PAGE)  # somebody shortens the file
        with pytest.raises(TransferError, match="reading 8192 bytes at offset 4096: 0 bytes moved"):
            file.read(PAGE, aligned_empty(2 * PAGE))


@pytest.mark.parametrize(
    ("offset", "start", "stop"),
    [(1, 0, PAGE), (0, 0, PAGE + 1), (0, 8, PAGE + 8), (8 * PAGE, 0, PAGE), (-PAGE, 0, PAGE)],
)
def test_misaligned_or_outside_is_our_own_error(
    tmp_path: Path, offset: int, start: int, stop: int
) -> None:
    with DiskFile(tmp_path / "store", 8 * PAGE) as file, pytest.raises(AssertionError):
        file.read(offset, aligned_empty(2 * PAGE)[start:stop])
