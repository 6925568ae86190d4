"""Ranks that share a node: the one place that turns a node's figures into a rank's, and back.

Rates of the two have types of their own (`PerNode`, `PerRank` in bigplan/units.py), so that mypy
refuses one where the other is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bigplan.units import PerNode, PerRank

# Whose a memory's capacity is: a GPU has its own; host memory and drives are the node's.
Scope = Literal["gpu", "node"]
WHOSE: dict[Scope, str] = {"gpu": "GPU", "node": "node"}


@dataclass(frozen=True, slots=True)
class NodeSharing:
    """`ranks` ranks that work on a node at the same time and get equal parts of it."""

    ranks: int

    def rate_of_rank(self, rate: PerNode) -> PerRank:
        """A rank's part of a rate that all the node's ranks have together."""
        return PerRank(rate / self.ranks)

    def rate_of_node(self, rate: PerRank) -> PerNode:
        """The rate that all the node's ranks have together."""
        return PerNode(rate * self.ranks)

    def counted(self, nbytes: int, scope: Scope) -> int:
        """A rank's `nbytes` as they count against the capacity of a memory of that scope."""
        return nbytes if scope == "gpu" else nbytes * self.ranks

    def bytes_of_rank(self, nbytes: int) -> int:
        """A rank's part of a node's bytes, rounded down."""
        return nbytes // self.ranks
