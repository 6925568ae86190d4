"""Batches: right tokens, the same samples however they are split, in background or not."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from bigplan.data.prepare import Preparation, prepare
from bigplan.data.sources import Fields
from bigplan.errors import InputError
from bigplan.runtime.data import IGNORED, Batch, BatchSource, Prefetcher, bundled_text, data_path
from tests.data.texts import documents, write_pairs
from tests.examples import examples

LENGTH = 7
WINDOWS = 24
TEXT = bytes(1 + (37 * i + i // 255) % 255 for i in range(LENGTH * WINDOWS + 3))
PAIRS = [(f"prompt {i}: ", f"response {i * i}" * (i % 3)) for i in range(12)]
SPLITS = ((1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (6, 2))  # ranks, samples a micro-batch

Sample = tuple[tuple[int, ...], tuple[int, ...]]  # tokens and targets


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    wanted = Preparation(
        (write_pairs(folder / "a.jsonl", PAIRS),), Fields(prompt="prompt", response="response")
    )
    prepare(wanted, folder / "out")
    return folder / "out"


def _samples(source: BatchSource, step: int) -> list[Sample]:
    """Every sample of a step on one rank."""
    found = []
    for index in range(source.micro_batches):
        batch = source.batch(step, index)
        found += [
            (tuple(row.tolist()), tuple(targets.tolist()))
            for row, targets in zip(batch.tokens, batch.targets, strict=True)
        ]
    return found


def test_tokens_are_the_bytes_of_the_file(text: Path) -> None:
    source = BatchSource(text, LENGTH, micro_batch=3, replica=0, replicas=1, seed=0)
    batch = source.batch(0, 0)
    assert batch.tokens.shape == batch.targets.shape == (3, LENGTH)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.counted == batch.divisor == 3 * LENGTH
    assert replace(batch, counted=0).divisor == 1
    for tokens, targets in _samples(source, 0):
        assert tokens[1:] == targets[:-1]
        start = TEXT.find(bytes([*tokens, targets[-1]]))
        assert start >= 0
        assert start % LENGTH == 0
    assert len(source.data) == len(TEXT)


@given(split=st.sampled_from(SPLITS), step=st.integers(0, 9), seed=st.integers(0, 3))
def test_a_global_batch_does_not_depend_on_its_split(
    text: Path, pairs: Path, split: tuple[int, int], step: int, seed: int
) -> None:
    world, micro_batch = split
    for path in (text, pairs):
        whole = BatchSource(path, LENGTH, 12, replica=0, replicas=1, seed=seed)
        source = BatchSource(path, LENGTH, micro_batch, 0, world, seed, global_batch=12)
        parts = [_samples(replace(source, replica=rank), step) for rank in range(world)]
        union = [sample for part in parts for sample in part]
        assert sorted(union) == sorted(_samples(whole, step))
        targets = [target for _, targets in union for target in targets]
        for rank in range(world):
            counted = replace(source, replica=rank).batch(step, 0).counted
            assert counted == sum(target != IGNORED for target in targets)


@pytest.mark.parametrize("batches", [None, 2])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2, 3), (3, 3)])
def test_replicas_with_unlike_sizes_have_the_same_samples(
    text: Path, pairs: Path, sizes: tuple[int, ...], batches: int | None
) -> None:
    for path in (text, pairs):
        whole = BatchSource(path, LENGTH, 12, 0, 1, seed=3, batches=batches)
        parts = [
            BatchSource(path, LENGTH, size, r, len(sizes), 3, 12, batches, sizes=sizes)
            for r, size in enumerate(sizes)
        ]
        for step in (0, 1):
            every = [[*_samples(part, step)] for part in parts]
            assert [len(own) for own in every] == [12 * size // sum(sizes) for size in sizes]
            # Micro-batch after micro-batch, replica after replica.
            order = [
                sample
                for index in range(12 // sum(sizes))
                for own, size in zip(every, sizes, strict=True)
                for sample in own[index * size : (index + 1) * size]
            ]
            assert order == _samples(whole, step)
            assert {part.counted(step) for part in parts} == {whole.counted(step)}


@pytest.mark.parametrize("batches", [None, 2])
@pytest.mark.parametrize("parts", [2, 6])
def test_parts_of_sequences_are_those_of_whole_ones(
    text: Path, pairs: Path, parts: int, batches: int | None
) -> None:
    """The last target of a part is the next part's first token, and all count the same targets."""
    for path in (text, pairs):
        whole = BatchSource(path, 12, 2, replica=1, replicas=2, seed=3, batches=batches)
        every = [replace(whole, part=part, parts=parts) for part in range(parts)]
        assert {source.nbytes for source in every} == {whole.nbytes // parts}
        for step in (0, 1):
            batch, found = whole.batch(step, 0), [source.batch(step, 0) for source in every]
            assert torch.equal(torch.cat([one.tokens for one in found], 1), batch.tokens)
            assert torch.equal(torch.cat([one.targets for one in found], 1), batch.targets)
            assert {one.counted for one in found} == {batch.counted}


def test_targets_without_loss_are_masked(pairs: Path) -> None:
    """Every window's targets are the tokens after it, where their document says so."""
    found = documents(pairs)
    ids = [i for document in found for i in document.ids]
    counts = [c for document in found for c in document.counts]
    source = BatchSource(pairs, LENGTH, 1, 0, 1, 0, batches=1000)
    assert source.steps == (len(ids) - 1) // LENGTH
    ignored = 0
    for window in range(source.steps):
        ((tokens, targets),) = _samples(source, window)
        start = window * LENGTH
        after = range(start + 1, start + LENGTH + 1)
        assert tokens == tuple(ids[start : start + LENGTH])
        assert targets == tuple(ids[i] if counts[i] else IGNORED for i in after)
        ignored += targets.count(IGNORED)
    assert 0 < ignored < source.steps * LENGTH


def test_each_pass_shows_every_window_once_in_another_order(text: Path) -> None:
    source = BatchSource(text, LENGTH, micro_batch=8, replica=0, replicas=1, seed=1)
    passes = [
        [sample for step in range(first, first + 3) for sample in _samples(source, step)]
        for first in (0, 3)
    ]
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1])
    assert len(set(passes[0])) == WINDOWS
    assert _samples(source, 0) != _samples(replace(source, seed=2), 0)


@given(st.integers(8, 60), st.integers(1, 5), st.integers(1, 7), st.integers(0, 5))
@settings(max_examples=examples(50), deadline=None)
def test_every_window_is_seen_once_a_pass(size: int, length: int, samples: int, seed: int) -> None:
    """Passes begin anywhere in a step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_bytes(bytes(range(1, size + 1)))
        source = BatchSource(path, length, samples, 0, 1, seed)
        steps = range(2 * source.windows)
        starts = [tokens[0] for step in steps for tokens, _ in _samples(source, step)]
    windows = [1 + length * window for window in range(source.windows)]
    for turn in range(2 * samples):
        seen = starts[turn * source.windows : (turn + 1) * source.windows]
        assert sorted(seen) == windows


@given(st.integers(1, 30), st.integers(1, 40))
@settings(max_examples=examples(40))
def test_a_validation_is_one_pass_at_most(text: Path, batches: int, samples: int) -> None:
    source = BatchSource(text, LENGTH, samples, 0, 1, 0, batches=batches)
    assert source.steps is not None
    found = [sample for step in range(source.steps) for sample in _samples(source, step)]
    counted = [s for s in found if s[1] != (IGNORED,) * LENGTH]
    used = min(WINDOWS, batches * samples)
    assert len(set(counted)) == len(counted) == used
    assert source.batch(0, 0).counted == used * LENGTH
    assert len(found) - len(counted) < samples  # what is beyond the pass fills the last batch


@pytest.mark.parametrize("first_step", [0, 5])
def test_prefetched_batches_are_the_same_from_any_step(text: Path, first_step: int) -> None:
    source = BatchSource(text, LENGTH, 2, 0, 2, seed=1, global_batch=12)
    prefetcher = Prefetcher(source, first_step, depth=2)
    for step in (first_step, first_step + 1):
        for index in range(3):
            ahead, now = prefetcher.take(step, index), source.batch(step, index)
            assert torch.equal(ahead.tokens, now.tokens)
            assert torch.equal(ahead.targets, now.targets)
    with pytest.raises(AssertionError, match="next in order"):
        prefetcher.take(first_step, 0)
    prefetcher.close()
    prefetcher.close()


def test_a_validation_can_be_taken_to_its_end(text: Path) -> None:
    source = BatchSource(text, LENGTH, 5, 0, 1, 0, global_batch=10, batches=9)
    prefetcher = Prefetcher(source)
    taken = [prefetcher.take(step, i) for step in range(source.steps or 0) for i in range(2)]
    prefetcher.close()
    assert len(taken) == 6
    rows = Counter(row for batch in taken for row in batch.tokens[:, 0].tolist())
    assert sum(rows.values()) == 30


def test_a_text_without_one_window_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * LENGTH)
    with pytest.raises(InputError, match=f"{LENGTH} tokens.*at least {LENGTH + 1}.*more text"):
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


def test_an_unprepared_file_is_refused(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", PAIRS)
    with pytest.raises(InputError, match=r"is JSONL.*bigplan data prepare .*a\.jsonl --out"):
        BatchSource(path, LENGTH, 1, 0, 1, 0)


def test_tokens_of_another_tool_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(b"".join(token.to_bytes(2, "little") for token in range(300)))
    with pytest.raises(InputError, match=r"train\.bin has a zero byte .*bigplan data prepare"):
        BatchSource(path, LENGTH, 1, 0, 1, 0)


def test_the_bundled_text_is_there() -> None:
    assert data_path("bundled") == bundled_text()
    assert BatchSource(bundled_text(), 16, 1, 0, 1, 0).windows > 10_000


def test_the_thread_stays_within_its_depth_and_ends(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    enough = threading.Event()

    def batch(self: BatchSource, step: int, index: int) -> Batch:
        made.append((step, index))
        if len(made) == 3:
            enough.set()
        return Batch(torch.zeros(1), torch.zeros(1), 1)

    monkeypatch.setattr(BatchSource, "batch", batch)
    before = set(threading.enumerate())  # a worker of another test may not be collected yet
    prefetcher = Prefetcher(BatchSource(text, LENGTH, 1, 0, 1, 0), depth=3)
    assert enough.wait(100)
    (thread,) = set(threading.enumerate()) - before
    prefetcher.close()
    assert made == [(0, 0), (1, 0), (2, 0)]
    assert not thread.is_alive()


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
