"""Batches of tokens, in an order that depends on the seed and on nothing else.

The tokens are cut into windows of `sequence_length`, whatever documents they belong to. Attention
crosses from one document into the next, unless a run keeps documents apart: then `bounds` says
where they are, and the first token of a document is no target.

Sample number i of a training run is window i of a shuffled pass over them (a fresh shuffle each
pass). Step s takes samples s * global_batch and following, so that the same samples are seen by any
number of ranks with any micro-batch, and resuming needs no state but the step number.

Where pairs of responses are learned from (data/pairs.py), a window is as many whole pairs as fit,
and padding behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigplan.data.documents import begins, bounds, check_documents
from bigplan.data.pairs import ABSENT, PackedPairs, Stretch, check_unpaired
from bigplan.data.prepared import Tokens, check_length, check_vocabulary, open_tokens
from bigplan.data.shuffle import shuffled
from bigplan.mechanics import MOST_READ_AHEAD, READ_AHEAD_BYTES

if TYPE_CHECKING:
    from bigplan.plan import Plan

IGNORED = -100  # a target that the loss does not count, as torch's cross_entropy has it


def bundled_text() -> Path:
    """The text that ships with the package."""
    return Path(str(files("bigplan"))) / "data" / "text.txt"


def data_path(data: str) -> Path:
    """The file or folder that `training.data` names."""
    return bundled_text() if data == "bundled" else Path(data).expanduser()


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens and targets of a micro-batch, int64 [micro_batch, length], on the CPU.

    The targets are the tokens one position later, IGNORED if the loss does not count them.
    `counted` is the number of targets in the loss's mean, or of pairs, over all its micro-batches
    and ranks.
    """

    tokens: Tensor
    targets: Tensor
    counted: int

    @property
    def divisor(self) -> int:
        """What sums over targets are divided by: a step that counts none has a mean of 0."""
        return max(1, self.counted)


@dataclass(frozen=True)
class BatchSource:
    """The batches of one of the replicas of the model: a pure function of step and micro-batch.

    A global batch is `global_batch` samples; micro-batch i of replica r holds its samples
    (i * replicas + r) * micro_batch and following. Where replicas have micro-batches of unlike
    `sizes`, samples go to them in the same order. Of ranks that split a replica's sequences, each
    has one of `parts`: `length` consecutive tokens. `global_batch` defaults to one micro-batch a
    rank. Without `batches` steps never end, and the loss is a step's mean. With `batches` there are
    at most that many steps, in at most one pass over the windows in order, and the loss is the mean
    of all. Samples after the last window exist but do not count. `isolated`: documents are kept
    apart. `paired`: windows are whole pairs, which the loss is the mean of.
    Raises InputError when the data cannot be read, is shorter than one window and its last target,
    or has no documents that could be kept apart.
    """

    path: Path
    sequence_length: int
    micro_batch: int
    replica: int
    replicas: int
    seed: int
    global_batch: int | None = None
    batches: int | None = None
    part: int = 0
    parts: int = 1
    sizes: tuple[int, ...] = ()  # sequences in a micro-batch, by replica; empty: all as micro_batch
    isolated: bool = False
    paired: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.replica < self.replicas and self.micro_batch > 0, self
        assert not self.sizes or len(self.sizes) == self.replicas, self
        assert not self.sizes or self.sizes[self.replica] == self.micro_batch, self
        assert self.samples % self.together == 0, self
        assert 0 <= self.part < self.parts and self.sequence_length % self.parts == 0, self
        if self.packed is not None:
            return
        check_unpaired(self.data)
        check_length(self.data, self.sequence_length)
        if self.isolated:
            check_documents(self.data)

    @classmethod
    def of(cls, plan: Plan, shard: int, data: str = "", batches: int | None = None) -> BatchSource:
        """A plan's training data for one of its shards, or other data, so many global batches.

        Raises InputError, also where a token is not in the model's vocabulary.
        """
        training, strategy, model = plan.training, plan.strategy, plan.model
        replica, part = divmod(shard, strategy.cp)
        source = cls(
            data_path(data or training.data),
            training.sequence_length,
            strategy.sizes[replica],
            replica,
            strategy.dp,
            training.seed,
            training.global_batch,
            batches,
            part,
            strategy.cp,
            strategy.sizes if strategy.replicas else (),
            training.isolate_documents,
            training.preference is not None,
        )
        check_vocabulary(source.data, model.vocab, model.name)
        return source

    @cached_property
    def data(self) -> Tokens:
        """The tokens; InputError when they cannot be read."""
        return open_tokens(self.path)

    @cached_property
    def packed(self) -> PackedPairs | None:
        """Where pairs are, if they are learned from. Raises InputError."""
        return PackedPairs.of(self.data, self.sequence_length) if self.paired else None

    @property
    def windows(self) -> int:
        """Samples in one pass: a window's last token is predicted from the next one's first."""
        if self.packed is not None:
            return self.packed.sequences
        return (len(self.data) - 1) // self.sequence_length

    @property
    def samples(self) -> int:
        """Samples a step over all ranks."""
        return self.together if self.global_batch is None else self.global_batch

    @property
    def together(self) -> int:
        """Samples in one micro-batch of every replica."""
        return sum(self.sizes) if self.sizes else self.micro_batch * self.replicas

    @property
    def before(self) -> int:
        """Of them, those of the replicas with lower numbers."""
        return sum(self.sizes[: self.replica]) if self.sizes else self.micro_batch * self.replica

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step on every rank."""
        return self.samples // self.together

    @property
    def nbytes(self) -> int:
        """Bytes of a micro-batch's tokens and targets."""
        return 2 * 8 * self.micro_batch * self.length

    @property
    def length(self) -> int:
        """Tokens of a sequence in a batch."""
        return self.sequence_length // self.parts

    @property
    def steps(self) -> int | None:
        """How many there are; None: no end."""
        return None if self.batches is None else min(self.batches, -(-self.windows // self.samples))

    def batch(self, step: int, micro_batch_index: int) -> Batch:
        """The micro-batch of a step; both count from 0."""
        assert step >= 0 and 0 <= micro_batch_index < self.micro_batches, (step, micro_batch_index)
        first = self.first(step, micro_batch_index)
        shape = self.micro_batch, self.length
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        for row in range(self.micro_batch):
            window = self._window(first + row)
            if window is not None:
                start = window.start + self.part * self.length
                ids = self.data.ids[start : min(start + self.length, window.stop)]
                tokens[row, : len(ids)] = ids
                # A pair's last token has no target: what follows is not its own.
                behind = window.stop if self.paired else window.stop + 1
                stop = min(start + self.length + 1, behind)
                if stop > start + 1:
                    wanted = self.data.ids[start + 1 : stop]
                    seen = np.flatnonzero(self._counted(start + 1, stop))
                    targets[row, seen] = wanted[seen]
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), self.counted(step))

    def bounds(self, step: int) -> Tensor:
        """Where documents are in all of a step's micro-batches, whose sequences are whole.

        int32 [micro-batches, micro_batch, 2, sequence_length]: documents.bounds of each sequence.
        """
        shape = self.micro_batches, self.micro_batch, 2, self.sequence_length
        found = np.empty(shape, np.int32)
        found[:, :, 0], found[:, :, 1] = 0, self.sequence_length
        for index in range(self.micro_batches):
            first = self.first(step, index)
            for row in range(self.micro_batch):
                window = self._window(first + row)
                if window is not None:
                    here = window.start, window.stop - window.start
                    found[index, row] = bounds(self.data, *here, self.sequence_length)
        return torch.from_numpy(found)

    def pairs(self, step: int) -> NDArray[np.int64]:
        """Which pairs a step's micro-batches have, in the order of their documents.

        int64 [micro-batches, micro_batch, most pairs of a sequence]; ABSENT where there are fewer.
        """
        assert self.packed is not None, "pairs are not learned from"
        firsts = (self.first(step, index) for index in range(self.micro_batches))
        rows = [[self._place(first + row) for row in range(self.micro_batch)] for first in firsts]
        each = [
            [self.packed.numbers(place) if place is not None else () for place in row]
            for row in rows
        ]
        most = max(len(pairs) for row in each for pairs in row)
        found = np.full((self.micro_batches, self.micro_batch, max(1, most)), ABSENT, np.int64)
        for index, row in enumerate(each):
            for number, pairs in enumerate(row):
                found[index, number, : len(pairs)] = pairs
        return found

    def first(self, step: int, micro_batch_index: int) -> int:
        """The first sample of a micro-batch."""
        return step * self.samples + micro_batch_index * self.together + self.before

    def _counted(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Whether the loss counts each of the tokens start, ..., stop - 1 as a target."""
        counted = self.data.counted(start, stop)
        if self.isolated:  # a document's first token follows from nothing
            counted[begins(self.data, start, stop)] = False
        return counted

    def counted(self, step: int) -> int:
        """Targets, or pairs, that the loss of this step is the mean of, over all ranks."""
        return self._count_of_all if self.batches is not None else self._count(step)

    @cached_property
    def _count_of_all(self) -> int:
        return sum(map(self._count, range(self.steps or 0)))

    def _count(self, step: int) -> int:
        if self._all_count and self.batches is None:
            return self.samples * self.sequence_length
        if step not in self._counts:
            self._counts.clear()  # a step's micro-batches follow each other
            numbers = range(self.samples * step, self.samples * (step + 1))
            self._counts[step] = sum(map(self._count_of, numbers))
        return self._counts[step]

    @cached_property
    def _counts(self) -> dict[int, int]:
        return {}

    def _count_of(self, number: int) -> int:
        place = self._place(number)
        if place is None:
            return 0
        if self.packed is not None:
            return self.packed.count(place)
        if self._all_count:
            return self.sequence_length
        start = place * self.sequence_length
        return int(self._counted(start + 1, start + self.sequence_length + 1).sum())

    @property
    def _all_count(self) -> bool:
        """Whether every token is a target."""
        return self.data.bits is None and not self.isolated

    def _place(self, number: int) -> int | None:
        """Which window a sample is; None behind the only pass."""
        epoch, place = divmod(number, self.windows)
        if self.batches is None:
            return shuffled(place, self.windows, self.seed, epoch)
        return None if epoch else place

    def _window(self, number: int) -> Stretch | None:
        """The tokens of a sample; None behind the only pass."""
        place = self._place(number)
        if place is None:
            return None
        if self.packed is not None:
            return self.packed.stretch(place)
        start = place * self.sequence_length
        return Stretch(start, start + self.sequence_length)


class Prefetcher:
    """Prepares the batches of a `source` in a background thread, step by step, in order.

    `depth` batches wait or are being made; default: as many as fill READ_AHEAD_BYTES, of ordinary
    memory. DATA copies a batch from there into the plan's page-locked buffer.
    """

    def __init__(self, source: BatchSource, first_step: int = 0, depth: int | None = None) -> None:
        self._source = source
        if depth is None:
            depth = min(MOST_READ_AHEAD, max(2, READ_AHEAD_BYTES // source.nbytes))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._order = _order(source, first_step)
        self._ahead: deque[tuple[tuple[int, int], Future[Batch]]] = deque()
        self._bounds: dict[int, Future[Tensor]] = {}  # by step, the next one ahead
        for _ in range(depth):
            self._start_next()

    def take(self, step: int, micro_batch_index: int) -> Batch:
        """`source.batch(step, micro_batch_index)`; asserts that every batch is taken in order.

        Raises what reading the batch raised.
        """
        key, future = self._ahead[0]
        assert (step, micro_batch_index) == key, (
            f"batch {(step, micro_batch_index)} asked for, the next in order is {key}"
        )
        batch = future.result()
        self._ahead.popleft()
        self._start_next()
        return batch

    def bounds(self, step: int) -> Tensor:
        """`source.bounds(step)`, found while the step before ran."""
        found = self._bounds.pop(step, None) or self._pool.submit(self._source.bounds, step)
        self._bounds = {step + 1: self._pool.submit(self._source.bounds, step + 1)}
        return found.result()

    def firsts(self, step: int) -> list[int]:
        """The first sample of each of a step's micro-batches."""
        source = self._source
        return [source.first(step, index) for index in range(source.micro_batches)]

    def pairs(self, step: int) -> NDArray[np.int64]:
        """`source.pairs(step)`."""
        return self._source.pairs(step)

    def close(self) -> None:
        """Drop what is ahead and join the thread. May be called again."""
        self._pool.shutdown(cancel_futures=True)

    def _start_next(self) -> None:
        key = next(self._order, None)
        if key is not None:
            self._ahead.append((key, self._pool.submit(self._source.batch, *key)))


def _order(source: BatchSource, first_step: int) -> Iterator[tuple[int, int]]:
    steps = count(first_step) if source.steps is None else range(first_step, source.steps)
    return ((step, index) for step in steps for index in range(source.micro_batches))
