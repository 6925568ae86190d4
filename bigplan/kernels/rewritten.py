"""Functions of torch that are captured as other operators than torch's own.

Batch norm is the operator that every device has. Cross-entropy is two operators that are a kernel
each: a loss a row, with the logarithm of the row's sum of exponentials, and the gradient by the
logits, which follows from the logits and that logarithm. Torch's own keep the logarithm of every
probability, often in fp32, from the forward to the backward. Convolutions have their images in the
order of tensor cores (`images.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from bigplan.kernels.images import ImageOrder

ATEN = torch.ops.aten
_library: Any = torch.library.Library
LIBRARY: Any = _library("bigplan_kernels", "DEF")
LIBRARY.define("cross_entropy_rows(Tensor self, Tensor target, int ignored) -> (Tensor, Tensor)")
LIBRARY.define(
    "cross_entropy_rows_backward(Tensor gradient, Tensor self, Tensor target, Tensor lse,"
    " int ignored) -> Tensor"
)
OPERATORS: Any = torch.ops.bigplan_kernels


def _rows(logits: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Losses and logarithms, fp32 [n, 1], of logits [n, V] and targets int64 [n, 1]."""
    wide, kept = logits.float(), target != ignored
    lse = wide.logsumexp(1, keepdim=True)
    picked = wide.gather(1, torch.where(kept, target, 0))
    return torch.where(kept, lse - picked, 0.0), lse


def _rows_meta(logits: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    row = logits.new_empty((len(logits), 1), dtype=torch.float32)
    return row, torch.empty_like(row)


def _rows_backward(
    gradient: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignored: int
) -> Tensor:
    kept = target != ignored
    result = torch.exp(logits.float() - lse)
    result.scatter_add_(1, torch.where(kept, target, 0), -kept.float())
    return (result * torch.where(kept, gradient, 0.0)).to(logits.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.ignored = inputs
    ctx.save_for_backward(logits, target, output[1])


def _gradient(ctx: Any, by_losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    logits, target, lse = ctx.saved_tensors
    back = OPERATORS.cross_entropy_rows_backward
    return back(by_losses, logits, target, lse, ctx.ignored), None, None


LIBRARY.impl("cross_entropy_rows", _rows, "CompositeExplicitAutograd")
LIBRARY.impl("cross_entropy_rows", _rows_meta, "Meta")
LIBRARY.impl("cross_entropy_rows_backward", _rows_backward, "CompositeExplicitAutograd")
LIBRARY.impl(
    "cross_entropy_rows_backward",
    lambda gradient, logits, *_: torch.empty_like(logits),
    "Meta",
)
torch.library.register_autograd(
    "bigplan_kernels::cross_entropy_rows", _gradient, setup_context=_save, lib=LIBRARY
)


def _cross_entropy(
    logits: Tensor, target: Tensor, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """F.cross_entropy, by our operators where it is of rows with one word each."""
    classes = logits.dim() == 2 and target.dtype == torch.int64
    narrow = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not (classes and narrow and plain):
        return F.cross_entropy(
            logits, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    rows = OPERATORS.cross_entropy_rows(logits, target.unsqueeze(1), ignore_index)
    losses: Tensor = rows[0].squeeze(1)
    if reduction == "mean":
        losses = losses.sum() / (target != ignore_index).sum()
    elif reduction == "sum":
        losses = losses.sum()
    return losses.to(logits.dtype)


def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float,
    epsilon: float, *_: Any,
) -> Tensor:  # fmt: skip
    """torch.batch_norm: GPUs have an operator of cuDNN's besides."""
    out: Tensor
    if mean is None:
        out, *_ = ATEN._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, epsilon)
    else:
        out, *_ = ATEN._native_batch_norm_legit.default(
            x, weight, bias, mean, variance, training, momentum, epsilon
        )
    return out


REWRITTEN: dict[Any, Callable[..., Tensor]] = {
    torch.batch_norm: _batch_norm,
    F.cross_entropy: _cross_entropy,
}


class _Rewritten(TorchFunctionMode):
    def __init__(self, images: ImageOrder) -> None:
        super().__init__()
        here = {torch.conv2d: images.conv2d, Tensor.view: images.view}
        self.functions: dict[Any, Callable[..., Any]] = {**REWRITTEN, **here}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.functions.get(func, func)(*args, **(kwargs or {}))


def rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with those of REWRITTEN, and its images as `images.py` has them."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        images = ImageOrder()
        for argument in tree_leaves((args, kwargs)):
            images.keep_order(argument)
        with _Rewritten(images):
            result = function(*args, **kwargs)
        return tree_map(images.as_given, result)

    return run
