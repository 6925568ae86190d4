"""The rule of three roundings passes what chance may do to a step in 16 bits, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.graph.strategy import Strategy
from bigplan.plan import Plan
from tests.runtime.harness import Run, execute
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.runtime.reference import LayerState
from tests.runtime.rounding import adamw_weights, check_in_16_bits
from tests.toys import kind_placement

BLOCK = 1  # the layer whose step is changed
RATE = 0.01


@pytest.fixture(scope="module")
def trained() -> tuple[Plan, Run]:
    """One step in bf16."""
    one = kind_placement(1)
    plan = plan_of(
        tiny_model(layers=1),
        tiny_training(2, precision="bf16"),
        Strategy(dp=1),
        placed(embedding=one, block=one, head=one),
    )
    return plan, execute(plan, steps=1)


def gradient_of(run: Run) -> Tensor:
    """The block's in the first step: without moments before it the first one is a tenth of it."""
    return run.states[1][BLOCK].moments[0] * 10


def changed(trained: tuple[Plan, Run], gradient: Tensor, moves: Tensor | float = 0.0) -> Run:
    """The run with another gradient of the block, and weights that moved by so much more."""
    plan, run = trained
    moments = (0.1 * gradient, 0.05 * gradient.square())
    weights, _ = adamw_weights(plan, (BLOCK, 1, RATE), run.states[0][BLOCK].weights, moments)
    layers = list(run.states[1])
    layers[BLOCK] = LayerState((weights + moves).float(), moments)
    return replace(run, states=(run.states[0], tuple(layers)))


def test_a_gradient_below_its_roundings_may_have_either_sign(trained: tuple[Plan, Run]) -> None:
    plan, run = trained
    gradient = gradient_of(run)
    size = gradient.abs()
    size[size < 1e-5] = torch.inf  # beside epsilon's 1e-6 they would hardly move a weight
    gradient[size.argsort()[:200]] *= -1
    other = changed(trained, gradient)
    moved = other.states[1][BLOCK].weights - run.states[1][BLOCK].weights
    assert int((moved.abs() > RATE).sum()) > 100  # of weights that each move by less
    check_in_16_bits(plan, run)
    check_in_16_bits(plan, other)


def test_an_update_is_that_of_the_moments(trained: tuple[Plan, Run]) -> None:
    plan, run = trained
    moves = torch.zeros_like(gradient_of(run))
    moves[7] = 1e-3 * RATE
    check_in_16_bits(plan, changed(trained, gradient_of(run)))
    with pytest.raises(AssertionError):
        check_in_16_bits(plan, changed(trained, gradient_of(run), moves))


def test_a_gradient_with_fewer_bits_is_seen(trained: tuple[Plan, Run]) -> None:
    plan, run = trained
    mantissa, exponent = torch.frexp(gradient_of(run))
    short = torch.ldexp((mantissa * 16).round() / 16, exponent)
    with pytest.raises(AssertionError):
        check_in_16_bits(plan, changed(trained, short))
