"""Batches: right tokens, the same samples however they are split, in background or not."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from bigplan.errors import InputError
from bigplan.runtime.data import (
    Batch,
    BatchSource,
    Prefetcher,
    TokenFile,
    bundled_text,
)

LENGTH = 7
WINDOWS = 24
TEXT = bytes((37 * i + i // 256) % 256 for i in range(LENGTH * WINDOWS + 3))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(TEXT)
    return path


def _samples(source: BatchSource, step: int) -> list[bytes]:
    """Every sample of a step on one rank: its tokens and the last target."""
    found = []
    for index in range(source.micro_batches):
        tokens, targets = source.batch(step, index)
        for row, target in zip(tokens, targets, strict=True):
            assert torch.equal(row[1:], target[:-1])
            found.append(bytes([*row.tolist(), int(target[-1])]))
    return found


def test_tokens_are_the_bytes_of_the_file(text: Path) -> None:
    source = BatchSource(text, LENGTH, micro_batch=3, rank=0, world=1, seed=0)
    tokens, targets = source.batch(0, 0)
    assert tokens.shape == targets.shape == (3, LENGTH)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    for sample in _samples(source, 0):
        start = TEXT.find(sample)
        assert start >= 0
        assert start % LENGTH == 0
    assert len(TokenFile(text)) == len(TEXT)


@given(
    split=st.sampled_from([(1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (6, 2)]),
    step=st.integers(0, 9),
    seed=st.integers(0, 3),
)
def test_a_global_batch_does_not_depend_on_its_split(
    text: Path, split: tuple[int, int], step: int, seed: int
) -> None:
    world, micro_batch = split
    whole = BatchSource(text, LENGTH, 12, rank=0, world=1, seed=seed)
    source = BatchSource(text, LENGTH, micro_batch, 0, world, seed, global_batch=12)
    parts = [_samples(replace(source, rank=rank), step) for rank in range(world)]
    union = [sample for part in parts for sample in part]
    assert sorted(union) == sorted(_samples(whole, step))
    assert parts == [_samples(replace(source, rank=rank), step) for rank in range(world)]


def test_each_pass_shows_every_window_once_in_another_order(text: Path) -> None:
    source = BatchSource(text, LENGTH, micro_batch=8, rank=0, world=1, seed=1)
    passes = [
        [sample for step in range(first, first + 3) for sample in _samples(source, step)]
        for first in (0, 3)
    ]
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1])
    assert len(set(passes[0])) == WINDOWS
    assert _samples(source, 0) != _samples(replace(source, seed=2), 0)


def test_a_text_without_one_window_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * LENGTH)
    with pytest.raises(InputError, match=f"{LENGTH} bytes.*at least {LENGTH + 1}.*longer text"):
        BatchSource(path, LENGTH, 1, 0, 1, 0)
    path.write_bytes(b"x" * (LENGTH + 1))
    assert BatchSource(path, LENGTH, 1, 0, 1, 0).windows == 1


@pytest.mark.parametrize("content", [None, b""])
def test_a_missing_or_empty_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "none.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"none\.txt"):
        BatchSource(path, LENGTH, 1, 0, 1, 0)


def test_the_bundled_text_is_there() -> None:
    assert len(TokenFile(bundled_text())) > 100_000


def test_prefetched_batches_are_the_same(text: Path) -> None:
    source = BatchSource(text, LENGTH, 2, 0, 2, seed=1, global_batch=12)
    prefetcher = Prefetcher(source, first_step=5, depth=2)
    for step in (5, 6):
        for index in range(3):
            ahead, now = prefetcher.take(step, index), source.batch(step, index)
            assert torch.equal(ahead[0], now[0])
            assert torch.equal(ahead[1], now[1])
    with pytest.raises(AssertionError, match="next in order"):
        prefetcher.take(5, 0)
    prefetcher.close()
    prefetcher.close()


def test_the_thread_stays_within_its_depth_and_ends(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    enough = threading.Event()

    def batch(self: BatchSource, step: int, index: int) -> Batch:
        made.append((step, index))
        if len(made) == 3:
            enough.set()
        return torch.zeros(1), torch.zeros(1)

    monkeypatch.setattr(BatchSource, "batch", batch)
    prefetcher = Prefetcher(BatchSource(text, LENGTH, 1, 0, 1, 0), depth=3)
    assert enough.wait(10)
    prefetcher.close()
    assert made == [(0, 0), (1, 0), (2, 0)]
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_errors_surface_where_the_batch_is_taken(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batch(self: BatchSource, step: int, index: int) -> Batch:
        raise OSError("the disk is gone")

    monkeypatch.setattr(BatchSource, "batch", batch)
    prefetcher = Prefetcher(BatchSource(text, LENGTH, 1, 0, 1, 0))
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            prefetcher.take(0, 0)
    prefetcher.close()


@pytest.mark.gpu
def test_pinned_batches(text: Path) -> None:
    prefetcher = Prefetcher(BatchSource(text, LENGTH, 1, 0, 1, 0), pinned=True)
    assert all(tensor.is_pinned() for tensor in prefetcher.take(0, 0))
    prefetcher.close()
