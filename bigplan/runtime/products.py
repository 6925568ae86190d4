"""Products with weights whose gradients are added to fp32 sums inside the matrix product.

From autograd every micro-batch's gradient of a weight is a tensor of its own in the weight's dtype,
rounded to it before it is added, and the addition costs 2 + 4 + 4 bytes of traffic an element. Here
the backward's product adds to the sum itself, so that bf16 and fp16 gradients are never rounded to
16 bits (as Megatron-LM's gradient accumulation fusion does with a kernel of its own).

On CUDA this is torch.addmm with `out_dtype`, which takes 16-bit factors for an fp32 result, and an
fp32 `self` since torch 2.10 (github.com/pytorch/pytorch/pull/167931). Where `self` and `out` are
one tensor it copies nothing and calls cuBLAS with that tensor as C: addmm_out_cuda_impl in
aten/src/ATen/native/cuda/Blas.cpp. The CPU has no such product and adds one computed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

# Takes the gradient [tokens, out] by a product's output, and its input [tokens, in].
AddProduct = Callable[[Tensor, Tensor], None]


def accumulates_in_product(gradient_dtype: torch.dtype) -> bool:
    """Whether products add weights' gradients to sums of this dtype: fp32 ones.

    A sum in 16 bits takes the gradients that autograd makes.
    """
    return gradient_dtype == torch.float32


def add_product(total: Tensor, gradient: Tensor, x: Tensor, *, fresh: bool) -> None:
    """Add gradient^T x to `total`, fp32 [out, in], or overwrite it where it is fresh.

    gradient [tokens, out] and x [tokens, in] are of one dtype; terms are added in fp32.
    """
    if total.is_cuda:
        torch.addmm(
            total, gradient.T, x, out_dtype=torch.float32, beta=0 if fresh else 1, out=total
        )
        return
    product = gradient.T.float() @ x.float()
    if fresh:
        total.copy_(product)
    else:
        total.add_(product)


class _Linear(Function):
    """F.linear, whose backward hands the factors of the weight's gradient to `add`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, add: AddProduct
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.add = add
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        ctx.add(gradient, x.flatten(0, -2))
        by_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return (gradient @ weight).view(x.shape), None, by_bias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, add: AddProduct) -> Tensor:
    """F.linear of x [..., in] by weight [out, in], which gets no gradient from autograd.

    Instead the backward calls `add` with the two factors of it.
    """
    return _Linear.apply(x, weight, bias, add)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(slots=True)
class Sums:
    """Sums of gradients by the parameter's name, known once a backward begins."""

    totals: dict[str, Tensor] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)  # of those that hold nothing yet

    def open(self, totals: Mapping[str, Tensor], *, fresh: bool) -> None:
        """Add to these from now on; what fresh ones hold is overwritten."""
        self.totals.update(totals)
        if fresh:
            self.fresh.update(totals)

    def linear(self, p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
        """blocks.plain_linear, but the weight's gradient is added here in the backward."""
        weight, bias = f"{name}.weight", p.get(f"{name}.bias")
        return linear(x, p[weight], bias, partial(self._add_product, weight))

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients that autograd has made."""
        for name, gradient in gradients.items():
            if self._starts(name):
                self.totals[name].copy_(gradient)
            else:
                self.totals[name].add_(gradient)

    def close(self) -> None:
        """Nothing more comes: sums that are still fresh are zero."""
        for name in self.fresh:
            self.totals[name].zero_()
        self.fresh.clear()

    def _add_product(self, name: str, gradient: Tensor, x: Tensor) -> None:
        add_product(self.totals[name], gradient, x, fresh=self._starts(name))

    def _starts(self, name: str) -> bool:
        starts = name in self.fresh
        self.fresh.discard(name)
        return starts
