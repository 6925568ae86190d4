"""Linear + cross-entropy in chunks of tokens: never all logits at once, and each gradient once.

A chunk is one product for its logits, one generated kernel that takes the losses and writes their
gradient over the logits, and two products for the gradients. The memory that logits may take gives
the tokens of a chunk: fewer tokens make narrower products, which are slower.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bigplan.errors import InputError
from bigplan.kernels.here import gpu_here, pricer_for, runs_kernels
from bigplan.kernels.rewritten import LIBRARY, OPERATORS

if TYPE_CHECKING:
    from bigplan.kernels.library import Library

ROWS = 128  # of a tile of products: chunks are whole multiples
MEMORY = 2**30  # bytes of a chunk's logits, where nobody says
LIBRARY.define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, int chunk, bool mean,"
    " bool wanted) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "linear_cross_entropy_backward(Tensor gradient, Tensor by_x, Tensor by_weight)"
    " -> (Tensor, Tensor)"
)


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


def _ahead(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int, mean: bool, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and if `wanted` its gradients, else two tensors without elements."""
    share = (targets >= 0).sum().clamp_min(1).reciprocal() if mean else x.new_ones(())
    scale = share.float().view(1)
    total = scale.new_zeros(())
    by_x = torch.empty_like(x) if wanted else x.new_empty(0)
    by_weight = torch.zeros_like(weight) if wanted else x.new_empty(0)
    for first in range(0, len(x), chunk):
        part = slice(first, first + chunk)
        logits = x[part] @ weight.T
        total += _losses(logits, targets[part], scale).sum()
        if wanted:
            torch.mm(logits, weight, out=by_x[part])
            by_weight.addmm_(logits.T, x[part])
        del logits  # before the next chunk's exist
    return total * scale[0], by_x, by_weight


def _losses(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """Losses of logits, which their gradient times `scale` replaces."""
    if runs_kernels({logits.device.type}):
        return _library().cross_entropy_(logits, targets, scale)
    target = targets.clamp_min(-1).unsqueeze(1)
    rows: tuple[Tensor, Tensor] = OPERATORS.cross_entropy_rows(logits, target, -1)
    losses, lse = rows
    given = scale.expand_as(losses)
    logits.copy_(OPERATORS.cross_entropy_rows_backward(given, logits, target, lse, -1))
    return losses.squeeze(1)


def _ahead_meta(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int, mean: bool, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    loss, nothing = x.new_empty((), dtype=torch.float32), x.new_empty(0)
    if not wanted:
        return loss, nothing, torch.empty_like(nothing)
    return loss, torch.empty_like(x), torch.empty_like(weight)


def _back(gradient: Tensor, by_x: Tensor, by_weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients times what the backward is given, if that is not 1."""
    capturing = gradient.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or float(gradient) != 1.0:  # a CUDA graph cannot ask
        return by_x * gradient, by_weight * gradient
    return by_x, by_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, by_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    back = OPERATORS.linear_cross_entropy_backward
    return (*back(by_loss, *ctx.saved_tensors), None, None, None, None)


LIBRARY.impl("linear_cross_entropy", _ahead, "CompositeExplicitAutograd")
LIBRARY.impl("linear_cross_entropy", _ahead_meta, "Meta")
LIBRARY.impl("linear_cross_entropy_backward", _back, "CompositeExplicitAutograd")
LIBRARY.impl(
    "linear_cross_entropy_backward",
    lambda gradient, by_x, by_weight: (torch.empty_like(by_x), torch.empty_like(by_weight)),
    "Meta",
)
torch.library.register_autograd(
    "bigplan_kernels::linear_cross_entropy", _gradient, setup_context=_save, lib=LIBRARY
)


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
    mean over the targets that count (0 if none does), or sum. The weight's gradient is added up
    over chunks in its own dtype. Raises InputError.
    """
    if reduction not in ("mean", "sum"):
        raise InputError(f"reduction is {reduction!r}; use 'mean' or 'sum'")
    chunk = chunk_for(len(x), len(weight), x.element_size(), memory)
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss, *_ = OPERATORS.linear_cross_entropy(
        x, weight, targets, chunk, reduction == "mean", wanted
    )
    return loss  # type: ignore[no-any-return]


@cache
def _library() -> Library:
    from bigplan.kernels.library import Library

    return Library(pricer_for(gpu_here()))
