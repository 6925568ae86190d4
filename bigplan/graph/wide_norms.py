"""What tensor-parallel ranks tell each other in a norm over all heads.

It is a norm of all queries or keys, or that of a state space (runtime/parallel/wide_norm.py).
"""

from __future__ import annotations

from bigplan.graph.operators import Collective
from bigplan.graph.shape import RankShape
from bigplan.spec.mixers import STATE_SPACE
from bigplan.spec.step import StepOp

NUMBER = 4  # bytes of a mean of squares, or of a projection, of each token


def wide_norms(shape: RankShape, *, back: bool = False) -> tuple[Collective, ...]:
    """Sums of one number a token, for queries and for keys, forward and again backward.

    A state space has one norm, if of one group, and its backward runs the forward again.
    """
    nbytes = NUMBER * shape.tokens
    if shape.tp == 1:
        return ()
    found, space = list[Collective](), shape.model.state_space
    if STATE_SPACE in shape.model.mixers_of_a_block and space and space.norm and space.groups == 1:
        found.append(Collective(f"{STATE_SPACE} norm", "all_reduce", nbytes, 1 + back))
    if shape.model.qk_norm_whole:
        wide = (step for step in shape.steps(StepOp.NORM) if step.reads[0].split)
        found += (Collective(step.name, "all_reduce", nbytes) for step in wide)
    return tuple(found)
