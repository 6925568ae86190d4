"""Causal attention with biased (ALiBi) or capped (Gemma 2) scores, or within documents.

torch's fused kernels take no bias but a matrix of scores. Heads with eight more columns carry the
biases through them (runtime/attention/alibi.py), but for 136 columns torch takes FlashAttention-2's
kernel of 192, and heads are copied: 1.50 and 3.32 ms for 32 heads of 128 and four sequences of
2,048 tokens on an H100, where these kernels take 0.41 and 1.28 and compiled flex attention 0.46 and
1.25 (benchmarks/results/2026-11-25-h100-alibi). Here a bias is a multiplication and an addition a
score. A capped score is cap * tanh(score / cap), whose derivative is 1 - tanh^2.

The forward is FlashAttention-2's (Dao 2023, arXiv 2307.08691, algorithm 1). Its backward adds
gradients by queries with atomics. Here they have a kernel of their own, which computes scores and
probabilities once more. So the same inputs give the same bits.

Tensors are contiguous [b, s, heads, d]; keys and values may have fewer heads. Scores are fp32, in
powers of two, and no tensor of s x s is in memory. With a window of w, a token sees itself and the
w - 1 tokens before it. With bounds (bigplan/data/documents.py) it sees tokens of its own document
alone: tiles of scores without such pairs are skipped, those with some others are masked. Bounds are
a tensor of one shape, whatever the number of documents, so that CUDA graphs repeat the kernels.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from bigplan.kernels.handwritten import attention_programs
from bigplan.kernels.handwritten.attention_programs import LOG2E


class ScoreRule(NamedTuple):
    """What becomes of products of queries and keys."""

    scale: float  # their factor
    cap: float | None = None  # of scaled ones, before a bias
    window: int | None = None  # tokens that a token sees

    @property
    def factor(self) -> float:
        """Of products: the kernels' scores are exponents of 2, or what tanh takes."""
        return float(self.scale * LOG2E.value if self.cap is None else self.scale / self.cap)

    @property
    def height(self) -> float:
        """The cap of the kernels' scores; 0: none."""
        return float((self.cap or 0.0) * LOG2E.value)


class Tile(NamedTuple):
    """Queries and keys whose scores a program has at a time, and how it is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Those of the result, of gradients by queries, and of gradients by keys and values."""

    result: Tile
    by_queries: Tile
    by_keys: Tile


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: ScoreRule,
    slopes: Tensor | None = None,
    bounds: Tensor | None = None,
) -> Tensor:
    """The same in plain torch, in the dtype of q: a score for each pair of tokens in memory."""
    length, heads = q.shape[1:3]
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    k, v = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (k, v))
    place = torch.arange(length, device=q.device)
    distance = place[None, :] - place[:, None]
    scores = q @ k.mT * rule.scale
    if rule.cap is not None:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    if slopes is not None:
        scores = scores + slopes.to(q)[:, None, None] * distance
    hidden = (distance > 0) | (distance <= -(rule.window or length))
    if bounds is not None:
        hidden = hidden | (place < bounds[:, 0, :, None])[:, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2)


# The fastest of 10 to 12 tiles for each kernel on an H100, 32 heads of 128 and 64 heads of 64, four
# sequences of 2,048 tokens (benchmarks/results/2026-11-25-h100-alibi). Those of 256 columns are the
# fastest of 24 and 54 on an H200, 8 heads capped at 50 and sequences of 4,096 tokens
# (2026-11-27-h200-gemma/tiles.txt). Gradients by keys of 64 columns want eight warps: with
# four a thread spills 2,400 bytes of registers, and a layer of Llama 3.2 1B by documents took 18.4
# ms in place of 4.2 (2026-11-28-h200-again).
HOPPER = {
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 1), Tile(128, 32, 8, 2)),
    128: Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 128, 8, 3)),
}
LARGE = 200 << 10  # bytes of shared memory that these tiles want: Hopper's 228 KiB, or Blackwell's
# What compiles for less without spilled registers, and what fits the 64 KiB of Turing. Neither has
# been measured.
SMALL, LEAST_SHARED = Tiles(*[Tile(64, 32, 4, 2)] * 3), 96 << 10
SMALLEST = Tiles(*[Tile(32, 32, 4, 1)] * 3)
SMALLEST_WIDE = Tiles(*[Tile(16, 16, 4, 1)] * 3)  # of 256 columns, whose rows are twice as long


def tiles_for(columns: int, shared: int) -> Tiles:
    """Tiles for heads of `columns`, on a GPU of so many bytes of shared memory."""
    if shared >= LARGE:
        return HOPPER[max(64, columns)]
    if columns > 128:
        return SMALLEST if shared >= LEAST_SHARED else SMALLEST_WIDE
    return SMALL if shared >= LEAST_SHARED else SMALLEST


@cache
def _tiles_on(device: torch.device, columns: int) -> Tiles:
    if device.type != "cuda":
        return tiles_for(columns, LARGE)
    return tiles_for(
        columns, torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    )


def _columns(width: int) -> int:
    """Of a tile: products have a power of two, 16 at least."""
    return max(16, 1 << (width - 1).bit_length())


def forward(
    inputs: tuple[Tensor, Tensor, Tensor],
    rule: ScoreRule,
    slopes: Tensor | None = None,
    tiles: Tiles | None = None,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The result, as q, and each query's logarithm of its sum, to base 2, fp32 [b, heads, s].

    `inputs`: q, k, v. `slopes`: fp32 [heads], by which a key's score falls with each token between
    it and the query; None: by nothing. `bounds`: int32 [b, 2, s], of each token where its document
    begins and ends; None: a sequence is one.
    """
    q, k, v = inputs
    batch, length, heads, width = q.shape
    groups, columns = heads // k.shape[2], _columns(width)
    tile, _, _ = tiles or _tiles_on(q.device, columns)
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    attention_programs.result[triton.cdiv(length, tile.queries), heads, batch](
        q, k, v, _slopes(slopes, q), lse if bounds is None else bounds, out, lse, rule.factor,
        rule.window or length, length, heads, groups, WINDOWED=rule.window is not None,
        APART=bounds is not None, CAP=rule.height, QUERIES=tile.queries, KEYS=tile.keys,
        WIDTH=width, D=columns, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def _slopes(slopes: Tensor | None, q: Tensor) -> Tensor:
    return q.new_zeros(q.shape[2], dtype=torch.float32) if slopes is None else slopes


def backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    rule: ScoreRule,
    slopes: Tensor | None = None,
    tiles: Tiles | None = None,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by q, k and v, the `inputs`, of forward's `results`."""
    (q, k, v), (out, lse) = inputs, results
    batch, length, heads, width = q.shape
    groups, columns = heads // k.shape[2], _columns(width)
    _, tile, other = tiles or _tiles_on(q.device, columns)
    by_q, by_k, by_v = (torch.empty_like(each) for each in inputs)
    deltas, slopes = torch.empty_like(lse), _slopes(slopes, q)
    documents = lse if bounds is None else bounds  # without bounds nobody reads it
    attention_programs.by_queries[triton.cdiv(length, tile.queries), heads, batch](
        q, k, v, slopes, documents, out, lse, gradient, deltas, by_q, rule.factor, rule.scale,
        rule.window or length, length, heads, groups, WINDOWED=rule.window is not None,
        APART=bounds is not None, CAP=rule.height, QUERIES=tile.queries, KEYS=tile.keys,
        WIDTH=width, D=columns, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    attention_programs.by_keys[triton.cdiv(length, other.keys), k.shape[2], batch](
        q, k, v, slopes, documents, lse, gradient, deltas, by_k, by_v, rule.factor, rule.scale,
        rule.window or length, length, heads, GROUPS=groups, WINDOWED=rule.window is not None,
        APART=bounds is not None, CAP=rule.height, QUERIES=other.queries, KEYS=other.keys,
        WIDTH=width, D=columns, num_warps=other.warps, num_stages=other.stages,
    )  # fmt: skip
    return by_q, by_k, by_v
