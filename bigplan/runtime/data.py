"""Byte tokens of a text, in an order that depends on the seed and on nothing else.

The text is cut into windows of `sequence_length` bytes. Sample number i of a training run is
window i of a shuffled pass over them (a fresh shuffle each pass). Step s takes samples
s * global_batch and following, so that the same samples are seen by any number of ranks with
any micro-batch, and resuming needs no state but the step number.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from itertools import count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigplan.errors import InputError

VOCABULARY = 256  # byte tokens
Batch = tuple[Tensor, Tensor]


def bundled_text() -> Path:
    """The text that ships with the package."""
    return Path(str(files("bigplan"))) / "data" / "text.txt"


class TokenFile:
    """The bytes of a file as tokens 0..255, memory-mapped: only what is read takes memory.

    Raises InputError when the file is missing or empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.tokens: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # numpy: "cannot mmap an empty file"
            raise InputError(
                f"training text {path} cannot be read ({error}): "
                "name a non-empty file, or none to train on the bundled text"
            ) from error

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


@dataclass(frozen=True)
class BatchSource:
    """The batches of one data-parallel rank: a pure function of step and micro-batch.

    A global batch is `global_batch` samples; micro-batch i of rank r holds its samples
    (i * world + r) * micro_batch and following. `global_batch` defaults to one micro-batch a
    rank. Raises InputError when the text is shorter than one window and its last target.
    """

    path: Path
    sequence_length: int
    micro_batch: int
    rank: int
    world: int
    seed: int
    global_batch: int | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world and self.micro_batch > 0, self
        assert self.samples % (self.micro_batch * self.world) == 0, self
        if self.windows < 1:
            raise InputError(
                f"training text {self.path} has {len(self.file)} bytes, sequence_length "
                f"{self.sequence_length} needs at least {self.sequence_length + 1} (a window and "
                "the target of its last byte): use a longer text or a shorter sequence_length"
            )

    @cached_property
    def file(self) -> TokenFile:
        """The text; InputError when it cannot be read."""
        return TokenFile(self.path)

    @property
    def windows(self) -> int:
        """Samples in one pass: a window's last token is predicted from the next one's first."""
        return (len(self.file) - 1) // self.sequence_length

    @property
    def samples(self) -> int:
        """Samples a step over all ranks."""
        return self.micro_batch * self.world if self.global_batch is None else self.global_batch

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step on every rank."""
        return self.samples // (self.micro_batch * self.world)

    def batch(self, step: int, micro_batch_index: int) -> Batch:
        """Tokens and targets, int64 [micro_batch, sequence_length] each, on the CPU.

        Steps and micro-batches count from 0. The targets are the tokens one position later.
        """
        assert step >= 0 and 0 <= micro_batch_index < self.micro_batches, (step, micro_batch_index)
        position = (micro_batch_index * self.world + self.rank) * self.micro_batch
        first = step * self.samples + position
        rows = np.stack([self._sample(first + row) for row in range(self.micro_batch)])
        both = torch.from_numpy(rows.astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _sample(self, number: int) -> NDArray[np.uint8]:
        """Window and last target of sample `number`: uint8 [sequence_length + 1]."""
        epoch, place = divmod(number, self.windows)
        window = int(_shuffle(self.seed, epoch, self.windows)[place])
        start = window * self.sequence_length
        return self.file.tokens[start : start + self.sequence_length + 1]


@lru_cache(maxsize=4)  # a batch touches one pass over the text, or two at its end
def _shuffle(seed: int, epoch: int, windows: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(windows)


class Prefetcher:
    """Prepares the batches of a `source` in a background thread, step by step, in order.

    `depth` batches wait or are being made; `pinned` puts them in page-locked memory, so that the
    copy to a GPU can run beside other work.
    """

    def __init__(
        self, source: BatchSource, first_step: int = 0, depth: int = 4, pinned: bool = False
    ) -> None:
        self._source = source
        self._pinned = pinned
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._order = (
            (step, index) for step in count(first_step) for index in range(source.micro_batches)
        )
        self._ahead: deque[tuple[tuple[int, int], Future[Batch]]] = deque()
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

    def close(self) -> None:
        """Drop what is ahead and join the thread. May be called again."""
        self._pool.shutdown(cancel_futures=True)

    def _start_next(self) -> None:
        key = next(self._order)
        self._ahead.append((key, self._pool.submit(self._make, *key)))

    def _make(self, step: int, index: int) -> Batch:
        tokens, targets = self._source.batch(step, index)
        return (tokens.pin_memory(), targets.pin_memory()) if self._pinned else (tokens, targets)
