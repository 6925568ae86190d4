"""A function of tensors that keeps its inputs alone: the backward runs it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def made_again(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """function(*inputs), whose graph is made in the backward, of those inputs that ask for it."""
    return _MadeAgain.apply(function, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class _MadeAgain(Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        asked = ctx.needs_input_grad[1:]
        inputs = [
            x.detach().requires_grad_(wanted)
            for x, wanted in zip(ctx.saved_tensors, asked, strict=True)
        ]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        leaves = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(output, leaves, gradients[0]))
        return None, *(next(found) if wanted else None for wanted in asked)
