"""How rows are multiplied by their experts' matrices: in the weights' dtype, or in 8 bits.

A matrix [f * experts, h] holds all experts', whose rows take turns (dispatch.py). Its rows'
products lead from h to f or back, forward and backward; its own gradient is a product of two
matrices of rows. What several products share is made once: `read` of rows, `read_again` in the
backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from bigplan.runtime.experts import dispatch as experts
from bigplan.runtime.experts.dispatch import Put

Open = Callable[[Tensor], Tensor]  # a matrix [out, in] of how its weight is stored
Factors = tuple[Tensor, Any]  # of a gradient [f * experts, h]: rows [rows, f], others as read again


class Grouped(Protocol):
    """Products of rows, of which `ends`, int32 [experts], says how many each expert has."""

    def read(self, rows: Tensor) -> Tensor:
        """Rows [rows, in] as products read them: row by row, so that copies may come after."""

    def entering(self, read: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Rows [rows, h] by their experts' matrices of [f * experts, h], transposed: [rows, f]."""

    def leaving(self, read: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Rows [rows, f] by their experts' matrices of [f * experts, h]: [rows, h]."""

    def read_again(self, rows: Tensor, ends: Tensor) -> Any:
        """Rows [rows, h] for `add`."""

    def add(self, total: Tensor, *, fresh: bool, factors: Factors, ends: Tensor, by: Put) -> None:
        """Add the product of both factors to `total` [f * experts, h], or overwrite a fresh one."""


def as_stored(weight: Tensor) -> Tensor:
    """The matrix of a weight that is stored as it is."""
    return weight


@dataclass(frozen=True, slots=True)
class OpenedExperts:
    """Products in the rows' dtype, of matrices that are opened for each product anew."""

    open: Open = as_stored

    def read(self, rows: Tensor) -> Tensor:
        """As they are."""
        return rows

    def entering(self, read: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """As Grouped."""
        return experts.grouped(read, experts.entering(self.open(weight), len(ends)), ends)

    def leaving(self, read: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """As Grouped."""
        return experts.grouped(read, experts.leaving(self.open(weight), len(ends)), ends)

    def read_again(self, rows: Tensor, ends: Tensor) -> Tensor:
        """As they are."""
        return rows

    def add(self, total: Tensor, *, fresh: bool, factors: Factors, ends: Tensor, by: Put) -> None:
        """As Grouped."""
        experts.add_grouped(total, factors, ends, fresh=fresh, by=by)


EXPERTS_AS_STORED = OpenedExperts()
