"""Products in 8-bit floating point (Micikevicius et al. 2022, arXiv 2209.05433).

Inputs and weights are cast to E4M3 and gradients of outputs to E5M2, each tensor by one scale of
its own that brings its largest absolute value to the dtype's, found anew for each product (current
scaling). Results are in 16 bits. Tensor cores want both factors with the dimension that is summed
last in memory, so the backward casts the transposes, too. Weights, what is kept for the backward
and sums of gradients stay as they are.

On a CPU the same casts are multiplied in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from bigplan.mechanics import LEAST_LARGEST
from bigplan.runtime.experts.grouped import Grouped
from bigplan.runtime.experts.grouped_eight_bits import EXPERTS

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(slots=True)
class Cast:
    """A matrix in 8 bits, [m, k] as `rows` and [k, m] as `columns`; times `scale` it is itself."""

    rows: Tensor | None
    columns: Tensor | None
    scale: Tensor  # fp32 []


class CastsTo(Protocol):
    """What casts a matrix to a dtype of 8 bits, in the forms that are asked for."""

    def __call__(
        self, x: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor]: ...


def cast(
    x: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """As kernels.eight_bits.cast, in plain torch."""
    highest = torch.finfo(dtype).max
    largest = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32).clamp_min(LEAST_LARGEST)
    small = (x.float() * (highest / largest)).to(dtype)
    return small if rows else None, small.T.contiguous() if columns else None, largest / highest


def multiplied(
    left: tuple[Tensor | None, Tensor], right: tuple[Tensor | None, Tensor], like: Tensor,
    *, bias: Tensor | None = None, exact: bool = True,
) -> Tensor:  # fmt: skip
    """Left [m, k] times right [n, k], transposed, both with their scales, in the dtype of `like`.

    Without `exact` tensor cores add up more terms in their own registers, of fewer bits than fp32.
    """
    (a, by_a), (b, by_b) = left, right
    assert a is not None and b is not None
    if a.is_cuda:
        return F.scaled_mm(
            a, b.T, by_a, ScalingType.TensorWise, by_b, ScalingType.TensorWise, bias=bias,
            output_dtype=like.dtype, use_fast_accum=not exact,
        )  # fmt: skip
    product = ((a.float() @ b.float().T) * (by_a * by_b)).to(like.dtype)
    return product if bias is None else product + bias


@dataclass(frozen=True, slots=True)
class EightBits:
    """Products with weights in 8 bits."""

    casts: CastsTo = cast
    grouped: Grouped = EXPERTS
    in_place: ClassVar[bool] = False

    def read(self, x: Tensor) -> tuple[Cast, Tensor]:
        """Its rows."""
        return self._cast(x.flatten(0, -2), VALUES, rows=True), x

    def product(self, read: tuple[Cast, Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., out]."""
        small, x = read
        by = self._cast(weight, VALUES, rows=True)
        factors = (small.rows, small.scale), (by.rows, by.scale)
        return multiplied(*factors, x, bias=bias, exact=False).view(*x.shape[:-1], len(weight))

    def given(self, gradient: Tensor) -> Cast:
        """For both gradients."""
        return self._cast(gradient, GRADIENTS, rows=True, columns=True)

    def by_input(self, given: Cast, weight: Tensor, total: Tensor | None = None) -> Tensor:
        """[tokens, in]."""
        by, rows = self._cast(weight, VALUES, columns=True), given.rows
        given.rows = None  # `by_weight` has no use for them
        found = multiplied((rows, given.scale), (by.columns, by.scale), weight)
        return found if total is None else total.add_(found)

    def read_again(self, x: Tensor) -> tuple[Cast, Tensor]:
        """Its columns."""
        return self._cast(x, VALUES, columns=True), x

    def by_weight(self, given: Cast, read_again: tuple[Cast, Tensor]) -> Tensor:
        """[out, in], rounded to 16 bits before it is added."""
        small, x = read_again
        return multiplied((given.columns, given.scale), (small.columns, small.scale), x)

    def _cast(
        self, x: Tensor, dtype: torch.dtype, *, rows: bool = False, columns: bool = False
    ) -> Cast:
        return Cast(*self.casts(x.contiguous(), dtype, rows=rows, columns=columns))
