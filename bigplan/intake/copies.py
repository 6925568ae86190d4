"""Groups of ranks that have a copy each of what ZeRO shards, as a tool's file tells them."""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.errors import InputError
from bigplan.units import counted


@dataclass(frozen=True, slots=True)
class Copies:
    """Neighbouring data-parallel ranks that share a copy, or how many copies there are.

    0: the file leaves it open. Without either, all ranks share one copy.
    """

    ranks: int = 0
    number: int = 0
    of_node: bool = False  # those of a node share one

    def together(self, dp: int, of_node: int, file: str) -> int:
        """Ranks that share a copy, of `dp` in all and `of_node` on a node.

        Raises InputError where the file's numbers do not divide the ranks.
        """
        ranks = min(dp, max(1, of_node)) if self.of_node else self.ranks
        number = self.number or (dp // ranks if ranks else 1)
        ranks = ranks or dp // number
        if ranks * number != dp:
            raise InputError(
                f"{file}: {counted(number, 'copy', 'copies')} of what is sharded over "
                f"{counted(ranks, 'rank')} each are not made of the {dp} data-parallel ranks; "
                "correct the file, or name the cluster that it runs on"
            )
        return ranks


ONE_COPY = Copies()  # which all ranks share
