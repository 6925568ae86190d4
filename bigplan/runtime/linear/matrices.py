"""How products with weights are multiplied: in the weights' dtype, or in 8 bits.

A product y = x W^T + b has three products: y itself, x's gradient (that of y times W) and W's
gradient (that of y, transposed, times x). What several of them share is made once: `read` of x,
`given` of y's gradient, `read_again` of x in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch.nn.functional as F
from torch import Tensor

from bigplan.runtime.experts.grouped import Grouped, Open, OpenedExperts, as_stored


class Matrices(Protocol):
    """The products with weights [out, in] of inputs [..., in]. What is read or given is theirs."""

    in_place: ClassVar[bool]  # whether a weight's gradient is added to its sum inside the product

    @property
    def grouped(self) -> Grouped:
        """How rows of experts are multiplied beside these."""

    def read(self, x: Tensor) -> Any:
        """An input, for `product`."""

    def product(self, read: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Like F.linear."""

    def given(self, gradient: Tensor) -> Any:
        """An output's gradient [tokens, out], for what follows."""

    def by_input(self, given: Any, weight: Tensor, total: Tensor | None = None) -> Tensor:
        """The input's gradient [tokens, in], added to `total` where there is one; asked once."""

    def read_again(self, x: Tensor) -> Any:
        """An input [tokens, in], for `by_weight`."""

    def by_weight(self, given: Any, read_again: Any) -> Tensor:
        """The weight's gradient [out, in]."""


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Opened:
    """Products in the weights' dtype, of matrices that are opened for each product anew."""

    open: Open = as_stored
    in_place: ClassVar[bool] = True

    read = given = read_again = staticmethod(_as_it_is)

    @property
    def grouped(self) -> Grouped:
        """As Matrices."""
        return OpenedExperts(self.open)

    def product(self, read: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Like F.linear."""
        return F.linear(read, self.open(weight), bias)

    def by_input(self, given: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        """[tokens, in]."""
        matrix = self.open(weight)
        return given @ matrix if total is None else total.addmm_(given, matrix)

    def by_weight(self, given: Tensor, read_again: Tensor) -> Tensor:
        """[out, in]."""
        return given.T @ read_again


AS_STORED = Opened()
