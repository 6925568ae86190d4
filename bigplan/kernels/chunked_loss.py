"""Captured functions whose linear and cross-entropy run in chunks of tokens (`loss.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bigplan.kernels.loss import linear_cross_entropy

PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
SAME = (Tensor.float, Tensor.to, Tensor.view, Tensor.reshape, Tensor.contiguous, Tensor.flatten)


class _InChunks(TorchFunctionMode):
    """Takes F.cross_entropy of a linear's result, maybe cast or viewed, from the linear's inputs.

    Logits that something else reads, too, are computed there once more.
    """

    def __init__(self, memory: int) -> None:
        super().__init__()
        self.memory = memory
        # By the identity of logits: themselves, so that it stays theirs, and what they come from.
        self.made: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is F.cross_entropy and (found := self._loss(*args, **named)) is not None:
            return found
        result = func(*args, **named)
        if isinstance(result, Tensor) and result.is_floating_point():
            self._remember(func, args, named, result)
        return result

    def _remember(self, func: Any, args: Any, named: Any, result: Tensor) -> None:
        source: Sequence[Any] | None = None
        if func is F.linear and len(args) > 1:
            *source, bias = (*args, named.get("bias"))[:3]  # nn.Linear gives three arguments
            source = source if bias is None else None
        elif func in PRODUCTS and len(args) == 2 and args[1].dim() == 2 and not named:
            source = args[0], args[1].T
        elif func in SAME and id(args[0]) in self.made:
            logits, *source = self.made[id(args[0])]
            if (result.numel(), result.shape[-1]) != (logits.numel(), logits.shape[-1]):
                source = None
        # Under autocast a product's result has another dtype than its inputs.
        if source is not None and (func in SAME or {t.dtype for t in source} == {result.dtype}):
            self.made[id(result)] = result, *source

    def _loss(self, logits: Tensor, target: Tensor, *more: Any, **named: Any) -> Tensor | None:
        source = self.made.get(id(logits))
        given = {name for name, value in named.items() if value is not None}
        named = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, **named}
        reduction, ignored = named["reduction"], named["ignore_index"]
        plain = not more and not given - {"ignore_index", "reduction", "label_smoothing"}
        if source is None or not plain or named["label_smoothing"] or ignored >= 0:
            return None
        if reduction not in ("mean", "sum"):
            return None
        if logits.dim() != 2 or target.dtype != torch.int64 or target.dim() != 1 or not len(target):
            return None
        _, x, weight = source
        loss = linear_cross_entropy(
            x.reshape(-1, x.shape[-1]), weight, target, memory=self.memory, reduction=reduction
        )
        return loss.to(logits.dtype)


def in_chunks(function: Callable[..., Any], memory: int) -> Callable[..., Any]:
    """The function with linear + cross-entropy in chunks, whose logits take `memory` bytes."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _InChunks(memory):
            return function(*args, **kwargs)

    return run
