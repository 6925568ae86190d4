"""Low-rank adapters beside products with frozen weights (LoRA, Hu et al., arXiv 2106.09685).

y = x W^T + s (x A^T) B^T, with A [rank, in] and B [out, rank]. Adapters of products of one input
read it together: their A's are one matrix [k * rank, in], without a copy where they lie side by
side. What A gives is `rank` columns wide and computed again in the backward, so that adapters keep
nothing of their own. Their gradients are added to sums inside the products that make them.

Tensor-parallel ranks need no further collective. Of a matrix split by rows each rank has its rows
of B, and all of A, of whose gradient its rows give a part. Of one split by columns it has its
columns of A, and all of B, of whose gradient its columns give a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bigplan.runtime.linear.matrices import Matrices

# Takes the gradient [tokens, out] by a product's output, and its input [tokens, in].
AddProduct = Callable[[Tensor, Tensor], None]


class Adapters(NamedTuple):
    """Those of products of one input; `up`: by the product's number."""

    scale: float
    down: Tensor  # A [k * rank, in], the targets' one below the other
    up: Mapping[int, Tensor]  # B [out, rank]
    add_down: AddProduct | None = None  # None: nobody asks this rank for gradients
    add_up: Mapping[int, AddProduct] | None = None

    @property
    def rank(self) -> int:
        """Columns between A and B."""
        return self.down.shape[0] // len(self.up)

    def _narrow(self, rows: Tensor) -> Tensor:
        """S x A^T [tokens, k * rank] of rows x [tokens, in]."""
        return (rows @ self.down.T).mul_(self.scale)

    def _parts(self, narrow: Tensor) -> dict[int, Tensor]:
        """Its columns of each target, by the product's number."""
        return dict(zip(self.up, torch.split(narrow, self.rank, dim=1), strict=True))

    def add_to(self, outputs: Sequence[Tensor], x: Tensor) -> None:
        """Add to the products' outputs [..., out] of x [..., in], in place."""
        for number, part in self._parts(self._narrow(x.flatten(0, -2))).items():
            output = outputs[number]
            output.view(-1, output.shape[-1]).addmm_(part, self.up[number].T)

    def by_narrow(self, by_outputs: Sequence[Tensor]) -> Tensor:
        """S dy B [tokens, k * rank], of the gradients [tokens, out] by all products' outputs."""
        first = by_outputs[0]
        gradient = first.new_empty(first.shape[0], self.down.shape[0])
        for number, part in self._parts(gradient).items():
            torch.mm(by_outputs[number], self.up[number], out=part)
        return gradient.mul_(self.scale)

    def add_by_input(self, total: Tensor, by_narrow: Tensor) -> None:
        """Add to the gradient [tokens, in] by the products' input, in place."""
        total.addmm_(by_narrow, self.down)

    def add_gradients(self, by_outputs: Sequence[Tensor], by_narrow: Tensor, rows: Tensor) -> None:
        """Add A's and B's gradients to their sums; `rows`: the products' input [tokens, in]."""
        if self.add_down is None or self.add_up is None:
            return
        for number, part in self._parts(self._narrow(rows)).items():
            self.add_up[number](by_outputs[number], part)
        self.add_down(by_narrow, rows)


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Matrices of equal widths as one, one below the other; None: they lie apart in memory."""
    first = tensors[0]
    if any(a.data_ptr() + a.nbytes != b.data_ptr() for a, b in pairwise(tensors)):
        return None
    rows, storage = sum(len(tensor) for tensor in tensors), first.untyped_storage().data_ptr()
    if any(tensor.untyped_storage().data_ptr() != storage for tensor in tensors):
        return None
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def below_each_other(tensors: Sequence[Tensor]) -> Tensor:
    """Matrices of equal widths as one, copied where they lie apart."""
    found = side_by_side(tensors)
    return torch.cat(list(tensors)) if found is None else found


class Adds(Protocol):
    """Adapters, or those with dropout (dropout.py)."""

    def add_to(self, outputs: Sequence[Tensor], x: Tensor) -> None:
        """As Adapters'."""


def adapted(outputs: Sequence[Tensor], x: Tensor, adapters: Adds | None) -> None:
    """Add what adapters give of x [..., in] to the products' outputs, where there are some."""
    if adapters is not None:
        adapters.add_to(outputs, x)


def adapted_linear(
    adapters: Adds | None,
    matrices: Matrices,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """F.linear of x [..., in], and what its adapter adds, without a graph."""
    output: Tensor = matrices.product(matrices.read(x), weight, bias)
    adapted([output], x, adapters)
    return output
