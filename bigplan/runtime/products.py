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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.lookup import add_rows
from bigplan.runtime.operators import gated as gated_activation
from bigplan.runtime.operators import gated_backward

# Takes the gradient [tokens, out] by a product's output, and its input [tokens, in].
AddProduct = Callable[[Tensor, Tensor], None]


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


class Factor(NamedTuple):
    """What x is multiplied by: weight [out, in] and bias, and who gets the weight's gradient."""

    weight: Tensor
    bias: Tensor | None
    add: AddProduct


class _Unread(Function):
    """x + F.linear(inner, weight, bias) for its backward alone: every element is one and the same.

    The weight's gradient goes to `add`, or to autograd without one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        inner: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        add: AddProduct | None,
    ) -> Tensor:
        ctx.save_for_backward(inner, weight)
        ctx.add, ctx.biased = add, bias is not None
        return x.new_empty(()).expand_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        inner, weight = ctx.saved_tensors
        (by_output,) = gradients
        gradient, rows = by_output.flatten(0, -2), inner.flatten(0, -2)
        by_weight = None if ctx.add else gradient.T @ rows
        if ctx.add:
            ctx.add(gradient, rows)
        by_inner = (gradient @ weight).view(inner.shape)
        return by_output, by_inner, by_weight, gradient.sum(0) if ctx.biased else None, None


def unread(p: Mapping[str, Tensor], name: str, x: Tensor, inner: Tensor) -> Tensor:
    """A graph like that of x plus the product of `inner` and `name`; its value is not computed.

    For recomputation, which wants what a block's operators save and not what comes of the last.
    """
    return _Unread.apply(x, inner, p[f"{name}.weight"], p.get(f"{name}.bias"), None)  # type: ignore[no-any-return, no-untyped-call]


class _Gated(Function):
    """x + F.linear(silu(gate) * up, weight, bias), whose activation is never kept.

    The pass over gate and up that takes their gradients gives it again: run again before, it would
    take one more. `factor` is weight, bias and who gets the weight's gradient: autograd without
    one. `unread`: for the backward alone, as _Unread.
    """

    @staticmethod
    def forward(
        ctx: Any, unread: bool, x: Tensor, gate: Tensor, up: Tensor, *factor: Any
    ) -> Tensor:
        weight, bias, ctx.add = factor
        ctx.save_for_backward(gate, up, weight)
        ctx.biased = bias is not None
        if unread:
            return x.new_empty(()).expand_as(x)
        return x + F.linear(gated_activation(gate, up), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        (by_output,) = gradients
        gradient = by_output.flatten(0, -2)
        inner = (gradient @ weight).view(gate.shape)
        by_gate, by_up = gated_backward(gate, up, inner, out=inner)
        del gate, up  # which may have been computed again, and are as large
        rows = inner.flatten(0, -2)
        by_weight = None if ctx.add else gradient.T @ rows
        if ctx.add:
            ctx.add(gradient, rows)
        by_bias = gradient.sum(0) if ctx.biased else None
        return None, by_output, by_gate, by_up, by_weight, by_bias, None


def gated(
    p: Mapping[str, Tensor], name: str, x: Tensor, gate: Tensor, up: Tensor, *, unread: bool = False
) -> Tensor:
    """Add to x the product of silu(gate) * up and `name`; keeps gate and up. `unread`: as above."""
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
    return _Gated.apply(unread, x, gate, up, weight, bias, None)  # type: ignore[no-any-return, no-untyped-call]


class _Linears(Function):
    """F.linear of one input by several weights, whose backward hands the factors to `adds`.

    The gradients by the input are added inside the products: from autograd each would be a tensor
    that one more kernel adds (0.56 of 51 ms of a block's backward on an H200).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, adds: Sequence[AddProduct], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(adds)], parameters[len(adds) :]
        ctx.save_for_backward(x, *weights)
        ctx.adds = adds
        return tuple(
            F.linear(x, w, b) for w, b in zip(weights, biases, strict=True) if w is not None
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted, rows = ctx.needs_input_grad[-len(weights) :], x.flatten(0, -2)
        by_input, by_bias = None, []
        for weight, add, has_bias, by_output in zip(
            weights, ctx.adds, wanted, gradients, strict=True
        ):
            gradient = by_output.flatten(0, -2)
            add(gradient, rows)
            by_bias.append(gradient.sum(0) if has_bias else None)
            if by_input is None:
                by_input = gradient @ weight
            else:
                by_input.addmm_(gradient, weight)
        assert by_input is not None
        return by_input.view(x.shape), None, *(None for _ in weights), *by_bias


def linears(x: Tensor, factors: Sequence[Factor]) -> tuple[Tensor, ...]:
    """F.linear of x [..., in] by each weight [out, in], which get no gradient from autograd.

    Instead the backward calls each `add` with the two factors of its weight's gradient.
    """
    weights, biases, adds = zip(*factors, strict=True)
    return _Linears.apply(x, adds, *weights, *biases)  # type: ignore[no-any-return, no-untyped-call]


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

    def linears(
        self, p: Mapping[str, Tensor], names: tuple[str, ...], x: Tensor
    ) -> tuple[Tensor, ...]:
        """blocks.plain_linears, but the weights' gradients are added here in the backward."""
        return linears(x, [self._factor(p, name) for name in names])

    def unread(self, p: Mapping[str, Tensor], name: str, x: Tensor, inner: Tensor) -> Tensor:
        """As above, but the weight's gradient is added here in the backward."""
        return _Unread.apply(x, inner, *self._factor(p, name))  # type: ignore[no-any-return, no-untyped-call]

    def gated(
        self,
        p: Mapping[str, Tensor],
        name: str,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        *,
        unread: bool = False,
    ) -> Tensor:
        """As above, but the weight's gradient is added here in the backward."""
        return _Gated.apply(unread, x, gate, up, *self._factor(p, name))  # type: ignore[no-any-return, no-untyped-call]

    def _factor(self, p: Mapping[str, Tensor], name: str) -> Factor:
        weight = f"{name}.weight"
        return Factor(p[weight], p.get(f"{name}.bias"), partial(self._add_product, weight))

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients that autograd has made."""
        for name, gradient in gradients.items():
            if self._starts(name):
                self.totals[name].copy_(gradient)
            else:
                self.totals[name].add_(gradient)

    def add_rows(self, name: str, rows: Tensor, gradients: Tensor) -> None:
        """Add gradients [n, h] by rows int64 [n] of a table."""
        if self._starts(name):
            self.totals[name].zero_()
        add_rows(self.totals[name], rows, gradients)

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
