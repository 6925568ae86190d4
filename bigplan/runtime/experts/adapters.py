"""Low-rank adapters beside experts' frozen matrices: an A and a B for each expert.

An expert's rows [rows, in] pass its own A and B, by grouped products as those of the experts
(dispatch.py). Where f is what tensor-parallel ranks split, the A of what leads into the experts and
the B of what leads back are [rank x experts, h], and the others [f x experts, rank]. What A gives
is made again in the backward, and gradients go to sums, as in adapters.py. So is what B gives the
gradient by it, for the gradients by rows and by A: these rows are copied in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from bigplan.runtime.experts import dispatch as experts
from bigplan.runtime.experts.dispatch import Adds, Put
from bigplan.spec.lora import RETURNING


class GroupedSums(Protocol):
    """Who adds up gradients of experts' matrices, by the parameter's name."""

    def add_by(self, name: str, add: Adds) -> None:
        """Add what `add` does."""


class ExpertAdapters(NamedTuple):
    """Those of one of experts' matrices."""

    name: str  # the matrix's, without its end
    scale: float
    down: Tensor  # every A
    up: Tensor  # every B
    sums: GroupedSums | None = None  # None: nobody asks this rank for gradients

    @classmethod
    def find(
        cls, p: Mapping[str, Tensor], matrix: str, scale: float, sums: GroupedSums | None
    ) -> ExpertAdapters | None:
        """Those of `matrix`, NAME.weight, where it has some."""
        name = matrix.removesuffix(".weight")
        if f"{name}.lora_A" not in p:
            return None
        return cls(name, scale, p[f"{name}.lora_A"], p[f"{name}.lora_B"], sums)

    @property
    def _returns(self) -> bool:
        """Whether the product leads back to the residual stream."""
        return self.name == RETURNING

    def _narrow(self, rows: Tensor, ends: Tensor) -> Tensor:
        """S x A^T [rows, rank] of rows x [rows, in]."""
        factor = experts.leaving if self._returns else experts.entering
        return experts.grouped(rows, factor(self.down, len(ends)), ends).mul_(self.scale)

    def add_to(self, output: Tensor, rows: Tensor, ends: Tensor) -> None:
        """Add to the product's output [rows, out] of `rows`, in place."""
        factor = experts.leaving if self._returns else experts.entering
        narrow = self._narrow(rows, ends)
        output.add_(experts.grouped(narrow, factor(self.up, len(ends)), ends))

    def _by_narrow(self, by_output: Tensor, ends: Tensor) -> Tensor:
        """S dy B [rows, rank], of the gradient [rows, out] by the product's output."""
        factor = experts.entering if self._returns else experts.leaving
        return experts.grouped(by_output, factor(self.up, len(ends)), ends).mul_(self.scale)

    def add_by_input(self, total: Tensor, by_output: Tensor, ends: Tensor) -> None:
        """Add to the gradient [rows, in] by the product's input, in place."""
        factor = experts.entering if self._returns else experts.leaving
        by_narrow = self._by_narrow(by_output, ends)
        total.add_(experts.grouped(by_narrow, factor(self.down, len(ends)), ends))

    def add_gradients(self, by_output: Tensor, rows: Tensor, ends: Tensor, by: Put) -> None:
        """Add every A's and B's gradients to their sums; `rows`: the product's input."""
        if self.sums is None:
            return
        of_up = by_output, self._narrow(rows, ends)
        of_down = self._by_narrow(by_output, ends), rows
        if self._returns:
            of_up, of_down = of_up[::-1], of_down[::-1]
        for end, factors in (("lora_B", of_up), ("lora_A", of_down)):
            add = partial(experts.add_grouped, factors=factors, ends=ends, by=by)
            self.sums.add_by(f"{self.name}.{end}", add)
