"""What tensor-parallel ranks gather and sum around a block's matrices."""

from __future__ import annotations

from bigplan.graph.operators import Collective, Pattern
from bigplan.graph.shape import RankShape


def into_matrix(
    shape: RankShape, name: str, chunks: int = 1, whole: int | None = None
) -> tuple[Collective, ...]:
    """Before a matrix split by rows: with sequence parallelism the sequence is gathered.

    `whole`: bytes of all tokens of what it reads; None: of the residual stream.
    """
    if not shape.sequence_parallel:
        return ()
    nbytes = (shape.whole_hidden if whole is None else whole) // chunks
    return (Collective(f"{name} gather", "all_gather", nbytes, chunks),)


def out_of_matrix(
    shape: RankShape, name: str, chunks: int = 1, beside: str = "", whole: int | None = None
) -> tuple[Collective, ...]:
    """After a matrix split by columns: the partial products are summed; `whole` of these."""
    if shape.tp == 1:
        return ()
    pattern: Pattern = "reduce_scatter" if shape.sequence_parallel else "all_reduce"
    nbytes = (shape.whole_hidden if whole is None else whole) // chunks
    return (Collective(f"{name} sum", pattern, nbytes, chunks, beside=beside),)
