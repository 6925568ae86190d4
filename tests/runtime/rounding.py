"""How near a plain loop on the CPU a GPU is, and tensor-parallel ranks in 16 bits are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bigplan.plan import Plan
from tests.runtime.harness import Run, loop_of, same_report
from tests.runtime.reference import DTYPES, LayerState, State

# GEMMs, norms and attention add up to 256 terms in another order than the CPU, through a few
# layers: 1e-5 is some 170 unit roundoffs of fp32.
GRADIENT = 1e-5
# AdamW divides by the gradient's size, so that elements near zero carry larger relative errors
# into the weights; of a whole layer's move they are a small part.
MOVE = 1e-3
# bf16 has 8 bits: 0.4% a rounding, averaged over the tokens of a batch.
BF16_LOSS = 0.01
# In 16 bits ranks round their parts of a product, the plain loop rounds all of it: one rounding
# becomes two or three, of numbers as large or smaller. So two such results are less than this many
# times as far apart as the plain loop's is from one without such roundings.
MORE = 3.0


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


def check_in_16_bits(plan: Plan, run: Run) -> None:
    """Every step is as near to the plain loop's as that is to one without 16-bit roundings.

    Which is a loop in fp32 from the same master weights, so it knows no scale of a loss either.
    """
    changes = {"precision": "fp32", "gradient_precision": "fp32"}
    wide_plan = plan.model_copy(update={"training": plan.training.model_copy(update=changes)})
    loop, wide = loop_of(plan), loop_of(wide_plan)
    unit = torch.finfo(DTYPES[plan.training.precision]).eps / 2
    for result, before, after in zip(run.results, run.states[:-1], run.states[1:], strict=True):
        loop.state, wide.state, wide.applied = before, before, loop.applied
        plain, exact = loop.step(), wide.step()
        same_report(plan, result, plain)
        assert result.loss == pytest.approx(plain.loss, rel=unit)
        for layer in zip(before, after, plain.state, exact.state, strict=True):
            for ours, one, two in zip(
                *(_changes(layer[0], each) for each in layer[1:]), strict=True
            ):
                assert _distance(ours, one) <= MORE * _distance(one, two)


def _changes(before: LayerState, after: LayerState) -> list[Tensor]:
    """How a step moved a layer's weights, and its moments after it."""
    return [after.weights - before.weights, *after.moments]


def _distance(ours: Tensor, plain: Tensor) -> float:
    return float((ours.double() - plain.double()).norm())
