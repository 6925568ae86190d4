"""Linear + cross-entropy in chunks of tokens: never all logits at once, and each gradient once.

A chunk is one product for its logits, one generated kernel that takes the losses and writes their
gradient over the logits, and two products for the gradients. The memory that logits may take gives
the tokens of a chunk: fewer tokens make narrower products, which are slower.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.errors import InputError
from bigplan.kernels.library import Library
from bigplan.kernels.optimised import Optimiser

ROWS = 128  # of a tile of products: chunks are whole multiples
MEMORY = 2**30  # bytes of a chunk's logits, where nobody says


def chunk_for(tokens: int, words: int, element: int, memory: int) -> int:
    """Tokens of a chunk whose logits take `memory` bytes at most; all chunks are about as long.

    Raises InputError where not even one tile of rows fits.
    """
    most = memory // (words * element) // ROWS * ROWS
    if tokens <= max(most, ROWS) and tokens * words * element <= memory:
        return tokens
    if not most:
        raise InputError(
            f"memory is {memory:,} bytes, and logits of {ROWS} tokens and {words:,} words take "
            f"{ROWS * words * element:,}; give it as many at least"
        )
    chunks = -(-tokens // most)
    return min(most, -(-tokens // chunks // ROWS) * ROWS)


class _LinearCrossEntropy(Function):
    """The loss with its gradients, which the backward multiplies by what it is given, if not 1."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, mean: bool
    ) -> Tensor:
        library = _library()
        share = (targets >= 0).sum().clamp_min(1).reciprocal() if mean else x.new_ones(())
        scale, wanted = share.float().view(1), any(ctx.needs_input_grad[:2])
        by_x, by_weight = (torch.empty_like(x), torch.zeros_like(weight)) if wanted else (x, weight)
        losses = []
        for first in range(0, len(x), chunk):
            part = slice(first, first + chunk)
            logits = x[part] @ weight.T
            losses.append(library.cross_entropy_(logits, targets[part], scale).sum())
            if wanted:
                torch.mm(logits, weight, out=by_x[part])
                by_weight.addmm_(logits.T, x[part])
        ctx.save_for_backward(*((by_x, by_weight) if wanted else ()))
        return torch.stack(losses).sum() * scale[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        by_x, by_weight = ctx.saved_tensors
        if float(gradients[0]) != 1.0:
            by_x, by_weight = by_x * gradients[0], by_weight * gradients[0]
        return by_x, by_weight, None, None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    memory: int = MEMORY,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy, fp32, of the logits x [n, h] @ weight [V, h]^T by targets int64 [n].

    A negative target counts nothing. `memory`: bytes that logits may take at once. `reduction`:
    mean over the targets that count, or sum. The weight's gradient is added up over chunks in its
    own dtype. Raises InputError.
    """
    if reduction not in ("mean", "sum"):
        raise InputError(f"reduction is {reduction!r}; use 'mean' or 'sum'")
    chunk = chunk_for(len(x), len(weight), x.element_size(), memory)
    mean = reduction == "mean"
    return _LinearCrossEntropy.apply(x, weight, targets, chunk, mean)  # type: ignore[no-any-return, no-untyped-call]


@cache
def _library() -> Library:
    return Library(Optimiser(None, 0.0).pricer)
