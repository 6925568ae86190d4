"""Pairs of documents, a chosen and a rejected response with their prompt, whole in each sequence.

A prepared folder has them back to back. Only a training knows how long its sequences are: a
sequence takes pairs in their order as long as they fit, and the rest of it is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bigplan.data.packer import Packer
from bigplan.data.prepared import Tokens
from bigplan.errors import InputError
from bigplan.units import counted

NO_PAIRS = (
    "run `bigplan data prepare` with --chosen-field and --rejected-field, and name its folder, or "
    "leave preference out"
)
ABSENT = -1  # no pair


class Stretch(NamedTuple):
    """Tokens start, ..., stop - 1."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PackedPairs:
    """Pairs in sequences of `length` tokens. Pair i is documents 2 i (chosen) and 2 i + 1."""

    ends: NDArray[np.int64]  # of each pair, behind its last token
    first: NDArray[np.int64]  # pair of each sequence, and behind the last sequence's

    @classmethod
    def of(cls, tokens: Tokens, length: int) -> Self:
        """Raises InputError for data without pairs, or with one longer than a sequence."""
        if not tokens.paired or tokens.ends is None:
            raise InputError(
                f"preference: data {tokens.path} has no pairs of responses; {NO_PAIRS}"
            )
        ends = tokens.ends[1::2].astype(np.int64)
        sizes = np.diff(ends, prepend=0)
        if (long := int((sizes > length).sum())) > 0:
            raise InputError(
                f"data {tokens.path} has {counted(long, 'pair')} of {len(ends):,} longer than "
                f"sequence_length {length} (the longest has {sizes.max()} tokens): use a longer "
                f"one, or prepare the data with --longest-pair {length}, which leaves them out"
            )
        first = [0]
        while first[-1] < len(ends):
            start = ends[first[-1] - 1] if first[-1] else 0
            first.append(int(np.searchsorted(ends, start + length, side="right")))
        return cls(ends, np.array(first, dtype=np.int64))

    @property
    def pairs(self) -> int:
        """How many there are."""
        return len(self.ends)

    @property
    def sequences(self) -> int:
        """How many they fill."""
        return len(self.first) - 1

    def stretch(self, sequence: int) -> Stretch:
        """The tokens of its pairs."""
        first, behind = self.first[sequence : sequence + 2]
        start = self.ends[first - 1] if first else 0
        return Stretch(int(start), int(self.ends[behind - 1]))

    def count(self, sequence: int) -> int:
        """Its pairs."""
        return int(self.first[sequence + 1] - self.first[sequence])

    def numbers(self, sequence: int) -> NDArray[np.int64]:
        """Which pairs it has."""
        return np.arange(self.first[sequence], self.first[sequence + 1])


def check_unpaired(tokens: Tokens) -> None:
    """Raise InputError where the next token would be learned from rejected responses, too."""
    if tokens.paired:
        raise InputError(
            f"data {tokens.path} has pairs of a chosen and a rejected response: train on them with "
            "--preference dpo, or prepare the chosen ones alone with --response-field"
        )


class WholePairs:
    """Adds pairs of documents to a packer, but those of more than `longest` tokens."""

    def __init__(self, packer: Packer, longest: int | None) -> None:
        self._packer, self._longest = packer, longest
        self._parts: list[tuple[NDArray[Any], bool, bool]] = []

    def add(self, ids: NDArray[Any], *, counts: bool, ends: bool) -> None:
        """A part of a document, as Packer.add has it."""
        self._parts.append((ids, counts, ends))
        if sum(end for *_, end in self._parts) < 2:
            return
        tokens = sum(len(part) + end for part, _, end in self._parts)
        if self._longest is not None and tokens > self._longest:
            self._packer.left_out += 1
            self._packer.shortest = min(tokens, self._packer.shortest or tokens)
        else:
            for part, target, end in self._parts:
                self._packer.add(part, counts=target, ends=end)
        self._parts.clear()
