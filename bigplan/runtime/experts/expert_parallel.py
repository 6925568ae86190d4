"""How tokens reach the ranks that have their experts, and what comes back.

Of expert-parallel ranks each has as many whole experts (Lepikhin et al., arXiv 2006.16668). A rank
routes its own tokens over all experts. An all-to-all then sends each token once to every rank that
has experts of it, however many these are, with its choices and their weights. There it is copied to
the rows of the experts, as on one rank, but for the choices that are elsewhere. A rank adds up what
its experts give of a token before it sends that back; the token's own rank adds up those sums. So
with k experts a token fewer than k hidden states pass on its behalf: of 8 experts on two ranks two.

NCCL takes numbers of rows from the CPU, which waits for the device once in a forward. The backward
sends tokens the same ways. So such passes have no CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from bigplan.runtime.experts import dispatch as experts
from bigplan.runtime.experts.dispatch import Places, RowOperators, in_order
from bigplan.runtime.operators import numbers_of
from bigplan.runtime.parallel.group import ALONE, Begun, RankGroup


class Dispatch(Protocol):
    """The ways of a micro-batch's tokens to their experts and back.

    `places` are those of all the rows of this rank's tokens, wherever their experts are: as `route`
    gives them.
    """

    @property
    def away(self) -> bool:
        """Whether tokens come from other ranks, so that it costs an exchange to have them again."""

    @property
    def first(self) -> int:
        """This rank's first expert."""

    def came(self, by: RowOperators, x: Tensor) -> Begun:
        """Begin to bring the tokens that this rank's experts get, of ranks' x [tokens, h] each."""

    def here(self, places: Places) -> Places:
        """Where the rows of the tokens that came are."""

    def ends(self, places: Places) -> Tensor:
        """How many of these rows this rank's experts up to each have, int32 [experts here]."""

    def weights(self, values: Tensor, places: Places) -> Tensor:
        """Numbers for rows at `places`, for the rows `here`: fp32 [rows]."""

    def combined(
        self, by: RowOperators, rows: Tensor, places: Places, beside: Tensor | None = None
    ) -> Begun:
        """Begin to add up by token [tokens, h] what experts give of rows `here`, and those beside.

        Nobody may read `rows` after this.
        """

    def returned(self, values: Tensor, places: Places) -> Tensor:
        """The way back of `weights`."""


@dataclass(frozen=True, slots=True)
class Here:
    """This rank has all experts: nothing is sent anywhere."""

    experts: int
    away: bool = False
    first: int = 0

    def came(self, by: RowOperators, x: Tensor) -> Begun:
        """As Dispatch."""
        return lambda: x

    def here(self, places: Places) -> Places:
        """As Dispatch."""
        return places

    def ends(self, places: Places) -> Tensor:
        """As Dispatch."""
        return places.ends(self.experts)

    def weights(self, values: Tensor, places: Places) -> Tensor:
        """As Dispatch."""
        return values

    def combined(
        self, by: RowOperators, rows: Tensor, places: Places, beside: Tensor | None = None
    ) -> Begun:
        """As Dispatch."""
        found = by.combined(rows, places, beside)
        return lambda: found

    def returned(self, values: Tensor, places: Places) -> Tensor:
        """As Dispatch."""
        return values


@dataclass(frozen=True)
class Away:
    """Tokens are sent to the ranks of their experts."""

    group: RankGroup
    experts: int  # of this rank
    sent: Places  # of tokens as they are sent: of each choice, the first that is on its rank
    choices: Tensor  # int32 [., k]: experts of the tokens that came
    rows: int  # of them
    out: Sequence[int]  # tokens for each rank
    into: Sequence[int]  # tokens of each rank
    away: bool = True

    @property
    def first(self) -> int:
        """As Dispatch."""
        return self.group.place * self.experts

    @classmethod
    def of(cls, group: RankGroup, places: Places, count: int) -> Away:
        """Tell ranks what comes, of `count` experts; the CPU waits for the device, once."""
        chosen, own = places.chosen, count // group.size
        ranks = chosen // own
        to = ranks.masked_fill(_again(ranks), group.size)
        order = in_order(to)
        numbers = torch.stack([_counts(one, group.size) for one in (to, ranks)], 1)
        coming = group.exchanged(numbers)
        *sizes, rows = numbers_of(
            torch.cat([numbers[:, 0], coming[:, 0], coming[:, 1].sum(0, True)])
        )
        out, into = sizes[: group.size], sizes[group.size :]
        sent = Places(to, order[: sum(out)])
        theirs = group.exchanged_rows(chosen.index_select(0, sent.tokens), out, into)()
        return cls(group, own, sent, theirs, rows, out, into)

    @cached_property
    def arrived(self) -> Places:
        """Of the rows of tokens that came. Sorting them takes its time beside the tokens' way."""
        local = self.choices - self.group.place * self.experts
        mine = local.masked_fill((local < 0) | (local >= self.experts), self.experts)
        return Places(mine, in_order(mine)[: self.rows])

    def came(self, by: RowOperators, x: Tensor) -> Begun:
        """As Dispatch."""
        return self._there(by.sent(x, self.sent))

    def here(self, places: Places) -> Places:
        """As Dispatch."""
        return self.arrived

    def ends(self, places: Places) -> Tensor:
        """As Dispatch."""
        return self.arrived.ends(self.experts)

    def weights(self, values: Tensor, places: Places) -> Tensor:
        """As Dispatch. All of a token's are sent, and those that belong here taken."""
        by_token = values[places.rows].view(places.chosen.shape)
        return self._there(by_token[self.sent.tokens])().flatten()[self.arrived.order]

    def combined(
        self, by: RowOperators, rows: Tensor, places: Places, beside: Tensor | None = None
    ) -> Begun:
        """As Dispatch."""
        back = self._back(by.combined(rows, self.arrived, beside))
        return lambda: by.combined(back(), self.sent, None)

    def returned(self, values: Tensor, places: Places) -> Tensor:
        """As Dispatch. A rank gives zero for choices that are not its own."""
        by_choice = values.new_zeros(self.arrived.chosen.numel())
        by_choice[self.arrived.order.long()] = values
        back = self._back(by_choice.view(self.arrived.chosen.shape))()
        return experts.combined(back, self.sent).flatten()[places.order]

    def _there(self, tokens: Tensor) -> Begun:
        return self.group.exchanged_rows(tokens, self.out, self.into)

    def _back(self, tokens: Tensor) -> Begun:
        return self.group.exchanged_rows(tokens, self.into, self.out)


def _again(ranks: Tensor) -> Tensor:
    """Which of a token's choices [tokens, k] are on a rank that one before is on, too."""
    return (ranks[:, :, None] == ranks[:, None, :]).tril(-1).any(-1)


def _counts(numbers: Tensor, several: int) -> Tensor:
    """How often each of the numbers below `several` is there, int32 [several]."""
    every = torch.arange(several, dtype=numbers.dtype, device=numbers.device)
    return (numbers.flatten() == every[:, None]).sum(1, dtype=torch.int32)


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
