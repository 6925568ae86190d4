"""What tensor-parallel ranks tell each other in a norm over all heads (runtime/wide_norm.py).

It is a norm of all queries or keys, or that of a state space.
"""

from __future__ import annotations

from bigplan.graph.operators import Collective
from bigplan.graph.shape import RankShape
from bigplan.graph.state_space import NUMBER, wide_norm
from bigplan.spec.mixers import STATE_SPACE
from bigplan.spec.step import StepOp


def wide_norms(shape: RankShape, *, back: bool = False) -> tuple[Collective, ...]:
    """A sum of one number a token for queries and one for keys, forward and again backward."""
    if shape.model.mixer == STATE_SPACE:
        return wide_norm(shape, back=back)
    if shape.tp == 1 or not shape.model.qk_norm_whole:
        return ()
    wide = (step for step in shape.steps(StepOp.NORM) if step.reads[0].split)
    return tuple(Collective(step.name, "all_reduce", NUMBER * shape.tokens) for step in wide)
