"""What tensor-parallel ranks tell each other in a norm over all heads (runtime/wide_norm.py)."""

from __future__ import annotations

from bigplan.graph.operators import Collective
from bigplan.graph.shape import RankShape
from bigplan.spec.step import StepOp

NUMBER = 4  # bytes of a mean of squares, or of a projection, of each token


def wide_norms(shape: RankShape) -> tuple[Collective, ...]:
    """A sum of one number a token for queries and one for keys, forward and again backward."""
    if shape.tp == 1 or not shape.model.qk_norm_whole:
        return ()
    wide = (step for step in shape.steps(StepOp.NORM) if step.reads[0].split)
    return tuple(Collective(step.name, "all_reduce", NUMBER * shape.tokens) for step in wide)
