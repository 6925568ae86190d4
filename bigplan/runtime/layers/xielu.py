"""xIELU (bigplan/spec/xielu.py) as an autograd function that keeps its input alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.constants import values_of
from bigplan.runtime.operators import wide
from bigplan.spec.xielu import AT_ONCE

if TYPE_CHECKING:
    from bigplan.kernels.library import Library


class Numbers(NamedTuple):
    """What the activation multiplies by, of one element each, fp32 or wider."""

    positive: Tensor
    negative: Tensor
    slope: Tensor
    edge: Tensor

    @classmethod
    def of(cls, positive: Tensor, negative: Tensor, slope: Tensor, edge: Tensor) -> Numbers:
        """Those of a block's parameters."""
        slope = values_of(slope)
        below = slope + F.softplus(wide(negative))
        return cls(F.softplus(wide(positive)), below, slope, values_of(edge))

    def value(self, x: Tensor) -> Tensor:
        """The activation of x, which is fp32 or wider."""
        below = (torch.expm1(torch.minimum(x, self.edge)) - x) * self.negative
        return torch.where(x > 0, x.square() * self.positive, below) + x * self.slope

    def gradients(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Those by x, and the sums of those by p and n, one element each."""
        above, opened = x > 0, torch.expm1(torch.minimum(x, self.edge))
        rising = torch.where(x < self.edge, opened, opened.new_full((), -1.0))
        slope = torch.where(above, 2.0 * self.positive * x, self.negative * rising) + self.slope
        by_positive = torch.where(above, x.square(), 0.0) * gradient
        by_negative = torch.where(above, 0.0, opened - x) * gradient
        return gradient * slope, by_positive.sum().view(1), by_negative.sum().view(1)


class _Xielu(Function):
    """By kernels where there is a library, else by torch's operators, in parts."""

    @staticmethod
    def forward(ctx: Any, library: Library | None, x: Tensor, *numbers: Tensor) -> Tensor:
        ctx.library = library
        ctx.save_for_backward(x, *numbers)
        own = Numbers.of(*numbers)
        if library is not None:
            return library.xielu(x, own)
        out = x.new_empty(x.shape)
        for one, into in zip(_parts(x), _parts(out), strict=True):
            into.copy_(own.value(wide(one)))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, *numbers = ctx.saved_tensors
        own, (gradient,) = Numbers.of(*numbers), gradients
        if ctx.library is not None:
            by_x, *sums = ctx.library.xielu_backward(x, own, gradient)
        else:
            by_x, sums = x.new_empty(x.shape), [torch.zeros_like(own.positive) for _ in range(2)]
            for one, by_out, into in zip(*map(_parts, (x, gradient, by_x)), strict=True):
                found, *more = own.gradients(wide(one), wide(by_out))
                into.copy_(found)
                sums = [total + part for total, part in zip(sums, more, strict=True)]
        trained = zip(numbers, sums, ctx.needs_input_grad[2:], strict=False)
        by_numbers = (
            (total * torch.sigmoid(wide(number))).to(number.dtype) if wanted else None
            for number, total, wanted in trained
        )
        return None, by_x, *by_numbers, None, None


def _parts(x: Tensor) -> Iterator[Tensor]:
    """Rows of x [..., f] with AT_ONCE elements or a little less."""
    rows = max(1, AT_ONCE // x.shape[-1])
    yield from torch.split(x.flatten(0, -2), rows)


def xielu(library: Library | None, x: Tensor, *numbers: Tensor) -> Tensor:
    """XIELU of x [..., f], by parameters in the order of `xielu_numbers`."""
    return _Xielu.apply(library, x, *numbers)  # type: ignore[no-any-return, no-untyped-call]
