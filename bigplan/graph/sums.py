"""What tensor-parallel ranks gather and sum around a block's matrices."""

from __future__ import annotations

from bigplan.graph.operators import Collective, Pattern
from bigplan.graph.shape import RankShape


def into_matrix(shape: RankShape, name: str, chunks: int = 1) -> tuple[Collective, ...]:
    """Before a matrix split by rows: with sequence parallelism the sequence is gathered."""
    if not shape.sequence_parallel:
        return ()
    return (Collective(f"{name} gather", "all_gather", shape.whole_hidden // chunks, chunks),)


def out_of_matrix(
    shape: RankShape, name: str, chunks: int = 1, beside: str = ""
) -> tuple[Collective, ...]:
    """After a matrix split by columns: the partial products are summed."""
    if shape.tp == 1:
        return ()
    pattern: Pattern = "reduce_scatter" if shape.sequence_parallel else "all_reduce"
    nbytes = shape.whole_hidden // chunks
    return (Collective(f"{name} sum", pattern, nbytes, chunks, beside=beside),)
