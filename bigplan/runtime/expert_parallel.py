"""How rows of tokens reach the ranks that have their experts, and come back.

Of expert-parallel ranks each has as many whole experts (Lepikhin et al., arXiv 2006.16668). A rank
routes its own tokens over all experts. Its rows lie by expert, so those for one rank lie together,
and an all-to-all takes them there. To the rank that gets them, a row is a token with one expert:
the operators that copy tokens to rows and add rows up by token bring it to its expert and back.
Rows of one expert then lie by rank and by token, as one rank with all the tokens has them.

NCCL takes numbers of rows from the CPU, which waits for the device once in a forward. The backward
sends rows the same ways. So such passes have no CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bigplan.runtime.experts import Places, RowOperators
from bigplan.runtime.group import ALONE, Begun, RankGroup


class Dispatch(Protocol):
    """The ways of a micro-batch's rows, all k of every token, from it to experts and back.

    `places` are those of the tokens' rows on this rank, which `route` gives.
    """

    @property
    def away(self) -> bool:
        """Whether rows go to other ranks, so that it costs an exchange to have them again."""

    def ends(self, places: Places) -> Tensor:
        """How many rows this rank's experts up to each have together, int32 [experts here]."""

    def sent(self, by: RowOperators, x: Tensor, places: Places) -> Tensor:
        """Rows of tokens x [tokens, h] at their experts: those of this rank's, by expert."""

    def weights(self, values: Tensor) -> Tensor:
        """A number for each of this rank's tokens' rows, at the rows' experts."""

    def combined(
        self, by: RowOperators, rows: Tensor, places: Places, beside: Tensor | None = None
    ) -> Begun:
        """Begin to add up by token [tokens, h] experts' results, and those beside.

        Nobody may read `rows` after this.
        """

    def returned(self, values: Tensor) -> Tensor:
        """The way back of `weights`."""


@dataclass(frozen=True, slots=True)
class Here:
    """Rows stay: this rank has all experts."""

    experts: int
    away: bool = False

    def ends(self, places: Places) -> Tensor:
        """As Dispatch."""
        return places.ends(self.experts)

    def sent(self, by: RowOperators, x: Tensor, places: Places) -> Tensor:
        """As Dispatch."""
        return by.sent(x, places)

    def weights(self, values: Tensor) -> Tensor:
        """As Dispatch."""
        return values

    def combined(
        self, by: RowOperators, rows: Tensor, places: Places, beside: Tensor | None = None
    ) -> Begun:
        """As Dispatch."""
        found = by.combined(rows, places, beside)
        return lambda: found

    def returned(self, values: Tensor) -> Tensor:
        """As Dispatch."""
        return values


@dataclass(frozen=True, slots=True)
class Away:
    """Rows go to the ranks of their experts."""

    group: RankGroup
    out: Sequence[int]  # rows of this rank's tokens for each rank's experts
    into: Sequence[int]  # rows of each rank's tokens for this rank's experts
    here: Places  # of rows that came, as of tokens with one expert each
    counts: Tensor  # int32 [experts here]: rows of each
    away: bool = True

    @classmethod
    def of(cls, group: RankGroup, places: Places, experts: int) -> Away:
        """Learn how many rows come: the CPU waits for the device, once."""
        ends = places.ends(experts)
        leaving = torch.diff(ends, prepend=ends.new_zeros(1)).view(group.size, -1)
        coming = group.exchanged(leaving)
        out, into = torch.stack([leaving.sum(1), coming.sum(1)]).tolist()
        return cls(group, out, into, came(coming, sum(into)), coming.sum(0, dtype=torch.int32))

    def ends(self, places: Places) -> Tensor:
        """As Dispatch."""
        return self.counts.cumsum(0, dtype=torch.int32)

    def sent(self, by: RowOperators, x: Tensor, places: Places) -> Tensor:
        """As Dispatch."""
        return by.sent(self._there(by.sent(x, places)), self.here)

    def weights(self, values: Tensor) -> Tensor:
        """As Dispatch."""
        return self._there(values)[self.here.order]

    def combined(
        self, by: RowOperators, rows: Tensor, places: Places, beside: Tensor | None = None
    ) -> Begun:
        """As Dispatch."""
        back = self._back(by.combined(rows, self.here, beside))
        return lambda: by.combined(back(), places, None)

    def returned(self, values: Tensor) -> Tensor:
        """As Dispatch."""
        return self._back(values[self.here.rows])()

    def _there(self, rows: Tensor) -> Tensor:
        return self.group.exchanged_rows(rows, self.out, self.into)()

    def _back(self, rows: Tensor) -> Begun:
        return self.group.exchanged_rows(rows, self.into, self.out)


def came(counts: Tensor, rows: int) -> Places:
    """Where rows that lie by rank, and of each by expert, go to lie by expert, and of each by rank.

    counts: int [ranks, experts], with so many rows in all, which the CPU knows.
    """
    ranks, experts = counts.shape
    numbers = torch.arange(experts, dtype=torch.int32, device=counts.device).repeat(ranks)
    chosen = numbers.repeat_interleave(counts.flatten(), output_size=rows)
    starts, mine = _starts(counts.flatten()).view(ranks, experts).T.flatten(), counts.T.flatten()
    moved = (starts - _starts(mine)).repeat_interleave(mine, output_size=rows)
    order = moved + torch.arange(rows, dtype=torch.int32, device=counts.device)
    return Places(chosen[:, None], order.to(torch.int32))


def _starts(counts: Tensor) -> Tensor:
    return counts.cumsum(0) - counts


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """A rank among those that share out experts; alone it has all of them."""

    group: RankGroup = ALONE

    def dispatch(self, places: Places, experts: int) -> Dispatch:
        """The ways of the rows at `places`, each of one of all `experts`."""
        if self.group.size == 1:
            return Here(experts)
        return Away.of(self.group, places, experts)


ALL_HERE = ExpertParallel()
