"""How near what a GPU computes is to a plain loop on the CPU."""

from __future__ import annotations

import pytest
from torch import Tensor

from bigplan.plan import Plan
from tests.runtime.harness import Run, loop_of
from tests.runtime.reference import State

# GEMMs, norms and attention add up to 256 terms in another order than the CPU, through a few
# layers: 1e-5 is some 170 unit roundoffs of fp32.
GRADIENT = 1e-5
# AdamW divides by the gradient's size, so that elements near zero carry larger relative errors
# into the weights; of a whole layer's move they are a small part.
MOVE = 1e-3
# bf16 has 8 bits: 0.4% a rounding, averaged over the tokens of a batch.
BF16_LOSS = 0.01


def _apart(ours: Tensor, plain: Tensor) -> float:
    """Relative distance of whole tensors."""
    return float((ours - plain).norm() / plain.norm().clamp_min(1e-30))


def check_within_rounding(plan: Plan, run: Run) -> None:
    """Every step from the run's own state, as on the CPU (tests/runtime/harness.py)."""
    loop = loop_of(plan)
    for result, before, after in zip(run.results, run.states[:-1], run.states[1:], strict=True):
        loop.state = before
        plain = loop.step()
        assert result.loss == pytest.approx(plain.loss, rel=GRADIENT)
        _check_step(before, after, plain.state)


def _check_step(before: State, after: State, plain: State) -> None:
    for old, ours, expected in zip(before, after, plain, strict=True):
        for number, (mine, plain_one) in enumerate(
            zip(ours.moments, expected.moments, strict=True)
        ):
            assert _apart(mine, plain_one) < GRADIENT * (number + 1)  # the second is of squares
        assert _apart(ours.weights - old.weights, expected.weights - old.weights) < MOVE
