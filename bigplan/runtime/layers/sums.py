"""Sums of a layer's gradients: who adds to them, and which hold nothing yet.

Products add to them inside a matrix product (products.py), autograd's gradients and rows of tables
are added after. The first to come to a sum overwrites it, so that nobody clears it before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bigplan.runtime.add_product import add_product
from bigplan.runtime.experts.dispatch import Adds
from bigplan.runtime.layers.lookup import add_rows
from bigplan.runtime.linear.adapters import side_by_side


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

    def close(self, names: Set[str] | None = None) -> None:
        """Nothing more comes to these, or to any: sums that are still fresh are zero."""
        done = self.fresh if names is None else self.fresh & names
        for name in done:
            self.totals[name].zero_()
        self.fresh = self.fresh - done

    def add_product(self, name: str, gradient: Tensor, x: Tensor) -> None:
        """Add gradient^T x, the two factors of a weight's gradient."""
        add_product(self.totals[name], gradient, x, fresh=self._starts(name))

    def add_products(self, names: Sequence[str], gradient: Tensor, x: Tensor) -> None:
        """The same for matrices of as many rows each, whose gradients lie side by side."""
        totals = side_by_side([self.totals[name] for name in names])
        starts = {self._starts(name) for name in names}
        if totals is not None and len(starts) == 1:
            add_product(totals, gradient, x, fresh=starts.pop())
            return
        assert len(starts) == 1, names
        parts = torch.split(gradient, gradient.shape[1] // len(names), dim=1)
        for name, part in zip(names, parts, strict=True):
            add_product(self.totals[name], part, x, fresh=True in starts)

    def add_by(self, name: str, add: Adds) -> None:
        """Add what `add` does."""
        add(self.totals[name], fresh=self._starts(name))

    def _starts(self, name: str) -> bool:
        starts = name in self.fresh
        self.fresh.discard(name)
        return starts
