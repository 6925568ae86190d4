"""Causal attention in plain torch, BLOCK queries at a time: any cap, slopes, window and documents.

Only BLOCK queries and the keys that they may see have their scores in memory. The backward computes
them again. On a CPU keys of documents that ended before a block are left out; a GPU's host knows
no documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bigplan.mechanics import CAPPED_BLOCK as BLOCK


class Scores(NamedTuple):
    """What becomes of products of queries and keys, and which a query sees."""

    scale: float
    cap: float | None = None
    window: int | None = None
    slopes: Tensor | None = None  # of linear biases, fp32 [heads]
    bounds: Tensor | None = None  # of documents, int32 [b, 2, s]: bigplan/data/documents.py


Heads = tuple[Tensor, Tensor, Tensor]  # queries [b, s, heads, d], keys and values of fewer heads


def forward(inputs: Heads, scores: Scores) -> tuple[Tensor, Tensor]:
    """The result [b, s, heads, e] of values of e columns; log of sums, fp32 [b, heads, s]."""
    q, k, v = inputs
    output = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    for rows, seen in _blocks(q.shape[1], scores):
        found, _ = _scores(q[:, rows], k[:, seen], rows, seen, scores)
        found = found.masked_fill_(_hidden(rows, seen, scores, q.device), -torch.inf)
        lse[:, :, rows] = sums = found.logsumexp(-1)
        shares = found.sub_(sums.unsqueeze(-1)).exp_().to(q.dtype)
        output[:, rows] = (shares @ _repeated(v[:, seen], q)).transpose(1, 2)
    return output, lse


def backward(
    gradient: Tensor, inputs: Heads, results: tuple[Tensor, Tensor], scores: Scores
) -> Heads:
    """Gradients by queries, keys and values, of forward's `results`."""
    (q, k, v), (output, lse) = inputs, results
    by_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    by_k, by_v = (torch.zeros(x.shape, device=x.device) for x in (k, v))
    for rows, seen in _blocks(q.shape[1], scores):
        query, found, by_out = (x[:, rows].transpose(1, 2) for x in (q, output, gradient))
        delta = (found.float() * by_out.float()).sum(-1, keepdim=True)
        whole, tanh = _scores(q[:, rows], k[:, seen], rows, seen, scores)
        shares = whole.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
        shares.masked_fill_(_hidden(rows, seen, scores, q.device), 0.0)
        by_shares = (by_out @ _repeated(v[:, seen], q).mT).float()
        by_scores = by_shares.sub_(delta).mul_(shares).mul_(scores.scale)
        if tanh is not None:
            by_scores.mul_(tanh.square_().neg_().add_(1.0))
        by_scores = by_scores.to(q.dtype)
        by_v[:, seen] += _summed(shares.to(q.dtype).mT @ by_out, v.shape[2])
        by_k[:, seen] += _summed(by_scores.mT @ query, k.shape[2])
        by_q[:, rows] = (by_scores @ _repeated(k[:, seen], q)).transpose(1, 2)
    return by_q, by_k.to(k.dtype), by_v.to(v.dtype)


def _blocks(length: int, scores: Scores) -> Iterator[tuple[slice, slice]]:
    """Some queries, and the keys that any of them may see."""
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        start = max(0, first + 1 - (scores.window or length))
        if scores.bounds is not None and scores.bounds.device.type == "cpu":
            start = max(start, int(scores.bounds[:, 0, first].min()))
        yield slice(first, last), slice(start, last)


def _hidden(rows: slice, seen: slice, scores: Scores, device: torch.device) -> Tensor:
    """Where a query does not see a key, [queries, keys]; of documents [b, 1, queries, keys]."""
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j = torch.arange(seen.start, seen.stop, device=device)
    hidden = (j > i) | (j <= i - scores.window) if scores.window else j > i
    if scores.bounds is not None:
        hidden = hidden | (j < scores.bounds[:, None, 0, rows, None])
    return hidden


def _scores(
    q: Tensor, k: Tensor, rows: slice, seen: slice, scores: Scores
) -> tuple[Tensor, Tensor | None]:
    """fp32 [b, heads, queries, keys], and of a score s with a cap tanh(s / cap) besides."""
    found, tanh = (q.transpose(1, 2) @ _repeated(k, q).mT).float(), None
    if scores.cap is None:
        found.mul_(scores.scale)
    else:
        tanh = found.mul_(scores.scale / scores.cap).tanh_()
        found = tanh * scores.cap
    if scores.slopes is not None:
        i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        j = torch.arange(seen.start, seen.stop, device=q.device)
        found.add_(scores.slopes[:, None, None] * (j - i))
    return found, tanh


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [b, n, kv heads, d] for each head of queries, [b, heads, n, d]."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2)


def _summed(x: Tensor, heads: int) -> Tensor:
    """Gradients by repeated heads [b, repeated, n, d] as those by the heads, [b, n, heads, d]."""
    b, repeated, n, width = x.shape
    return x.view(b, heads, repeated // heads, n, width).float().sum(2).transpose(1, 2)
