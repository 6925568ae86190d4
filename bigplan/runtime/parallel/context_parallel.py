"""What context-parallel ranks exchange around a mixer (DeepSpeed Ulysses, arXiv 2309.14509).

A rank has consecutive tokens of every sequence of a micro-batch, [b, s / ranks, heads, d] of
queries. Attention, a delta rule and a state space want whole sequences, but know nothing of other
heads. So before it each rank sends the others their heads and gets their tokens,
[b, s, heads / ranks, d]. After it they come back. All else in a layer looks at single tokens, or as
a short convolution at a few before (mixers/convolution.py), and is the same with any number of
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.parallel.group import ALONE, RankGroup


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """A rank among those that split sequences; alone it has whole ones."""

    group: RankGroup = ALONE

    def first(self, length: int) -> int:
        """The position of this rank's first token, where each rank has `length` of a sequence."""
        return self.group.place * length

    def whole_sequences(self, x: Tensor) -> Tensor:
        """[b, s / ranks, heads, d] as all tokens of this rank's heads, [b, s, heads / ranks, d].

        Where there are fewer heads than ranks, neighbours get the same one.
        """
        if self.group.size == 1:
            return x
        if x.shape[2] < self.group.size:
            x = x.repeat_interleave(self.group.size // x.shape[2], dim=2)
        return _Exchanged.apply(x, self.group, True)  # type: ignore[no-any-return, no-untyped-call]

    def own_tokens(self, x: Tensor) -> Tensor:
        """The way back: [b, s, heads / ranks, d] as [b, s / ranks, heads, d]."""
        if self.group.size == 1:
            return x
        return _Exchanged.apply(x, self.group, False)  # type: ignore[no-any-return, no-untyped-call]

    def heads_side_by_side(self, x: Tensor, width: int) -> Tensor:
        """As whole_sequences, of heads of so many columns each that lie side by side, [b, s, .]."""
        if self.group.size == 1:
            return x
        return self.whole_sequences(torch.unflatten(x, -1, (-1, width))).flatten(2)

    def tokens_of_all_heads(self, x: Tensor) -> Tensor:
        """The way back: this rank's heads side by side, [b, s, .], as its tokens of all of them."""
        return x if self.group.size == 1 else self.own_tokens(x.unsqueeze(2)).flatten(2)

    def own_heads(self, x: Tensor, width: int = 1) -> Tensor:
        """Rows of x [heads * width, ...] of the heads that whole_sequences gives this rank."""
        ranks, heads = self.group.size, len(x) // width
        first = self.group.place * heads // ranks
        return x[first * width : (first + max(1, heads // ranks)) * width]


WHOLE = ContextParallel()


class _Exchanged(Function):
    """Tokens for heads, or heads for tokens; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(x, group, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return _exchanged(gradients[0], ctx.group, to_heads=not ctx.to_heads), None, None


def _exchanged(x: Tensor, group: RankGroup, *, to_heads: bool) -> Tensor:
    """Cut into a part for each rank, [ranks, b, s / ranks, heads / ranks, d]; those of all joined.

    A single sequence's tokens lie one behind the other in the parts, so that nothing is copied.
    """
    if to_heads:
        parts = torch.unflatten(x, 2, (group.size, -1)).permute(2, 0, 1, 3, 4)
        return group.exchanged(parts).transpose(0, 1).flatten(1, 2)
    parts = torch.unflatten(x, 1, (group.size, -1)).transpose(0, 1)
    return group.exchanged(parts).permute(1, 2, 0, 3, 4).flatten(2, 3)
