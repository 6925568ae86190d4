"""A vocabulary whose words tensor-parallel ranks share out: who has a word, and the loss over all.

A rank has equally many rows of the token table and of the head's, one behind the other, the last
ones filled up (Shoeybi et al., arXiv 1909.08053, section 3). So a rank has a part of every token's
logits. For the loss over all words it needs two numbers a token from each other rank: the logsumexp
of that rank's words and, if the target is among them, the target's logit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.runtime import operators
from bigplan.runtime.parallel.tensor_parallel import ONE, TensorParallel


def own_rows(words: Tensor, rows: int, ranks: TensorParallel) -> tuple[Tensor, Tensor]:
    """The row of each word in a rank's `rows` of a table, and where another has it: 0 and true."""
    own = words - ranks.group.place * rows
    others = (own < 0) | (own >= rows)
    return own.masked_fill(others, 0), others


class Words(NamedTuple):
    """A vocabulary, and the cap of its words' scores, if any."""

    number: int
    cap: float | None = None


class _SharedCrossEntropy(Function):
    """Loss of every token, fp32 [n], of a rank's part of the logits [n, rows]: the same on all.

    Logits are capped where they lie, and the backward overwrites them. Rows that fill the table up
    count as words of probability 0.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, words: Words, ranks: TensorParallel
    ) -> Tensor:
        rows = logits.shape[1]
        real = min(max(0, words.number - ranks.group.place * rows), rows)
        if words.cap is not None:
            logits.div_(words.cap).tanh_().mul_(words.cap)
        ctx.cap, ctx.real = words.cap, real
        logits[:, real:] = -torch.inf
        own, others = own_rows(targets, rows, ranks)
        own = torch.where(targets < 0, targets, own.masked_fill(others, rows))
        losses, lse = operators.row_losses(logits, own)
        picked = torch.where(others, 0.0, lse - losses)
        every = ranks.group.gathered(torch.stack((lse, picked))[None])()
        lse, picked = every[:, 0].logsumexp(0), every[:, 1].sum(0)
        ctx.save_for_backward(logits, own, lse)
        return torch.where(targets < 0, 0.0, lse - picked)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        logits, own, lse = ctx.saved_tensors
        if ctx.cap is None:
            return operators.by_logits_(logits, own, lse, gradients[0]), None, None, None
        slope = (logits / ctx.cap).square_().neg_().add_(1.0)
        slope[:, ctx.real :] = 0.0
        by_capped = operators.by_logits_(logits, own, lse, gradients[0])
        return by_capped.mul_(slope), None, None, None


def cross_entropy(
    logits: Tensor, targets: Tensor, words: Words, ranks: TensorParallel = ONE
) -> Tensor:
    """Sum over tokens of logits [n, V] by targets int64 [n]; -100 counts nothing. fp32.

    If ranks share out the words, each has a part of each token's logits, and the whole sum.
    """
    if ranks.alone:
        return operators.cross_entropy(logits, targets, words.cap)
    return token_losses(logits, targets, words, ranks).sum()


def token_losses(
    logits: Tensor, targets: Tensor, words: Words, ranks: TensorParallel = ONE
) -> Tensor:
    """The cross-entropy of every token, fp32 [n]; all else as cross_entropy has it.

    The backward takes a gradient for each token, and overwrites the logits.
    """
    losses: Tensor = _SharedCrossEntropy.apply(logits, targets, words, ranks)  # type: ignore[no-untyped-call]
    return losses
