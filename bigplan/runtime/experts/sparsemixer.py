"""SparseMixer's weights of a token's experts (arXiv 2409.12136), as PhiMoE evaluates them.

The experts are those with the largest scores, one after the other. The weight of each is its share
by a softmax over the experts that were not chosen before it and whose scores come near the largest
of these. Its gradient is this softmax's, which is the paper's where the likeliest expert is chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor


def shares(scores: Tensor, each: int, jitter: float) -> tuple[Tensor, Tensor]:
    """Weights fp32 and experts int64, [tokens, each], of fp32 scores [tokens, experts]."""
    chosen = scores.topk(each, dim=-1).indices
    mine = [_among(scores, chosen[:, :turn], jitter) for turn in range(each)]
    found = [one.gather(-1, chosen[:, turn, None]) for turn, one in enumerate(mine)]
    return torch.cat(found, dim=-1), chosen


def by_scores(scores: Tensor, chosen: Tensor, by_shares: Tensor, jitter: float) -> Tensor:
    """The gradient by fp32 scores [tokens, experts] of that by weights, fp32 [tokens, each]."""
    total = torch.zeros_like(scores)
    for turn in range(chosen.shape[1]):
        every, expert = _among(scores, chosen[:, :turn], jitter), chosen[:, turn, None]
        weighted = by_shares[:, turn, None] * every.gather(-1, expert)
        total.sub_(every.mul_(weighted)).scatter_add_(-1, expert, weighted)
    return total


def _among(scores: Tensor, before: Tensor, jitter: float) -> Tensor:
    """Shares of the experts that were not chosen `before` [tokens, n], of those that come near."""
    left = scores.scatter(-1, before, float("-inf"))
    best = left.amax(-1, keepdim=True)
    far = (best - scores) / scores.abs().clamp(min=best) > 2 * jitter
    return left.masked_fill_(far, float("-inf")).softmax(-1)
