"""How near a plain loop on the CPU a GPU is, and tensor-parallel ranks in 16 bits are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bigplan.plan import Plan
from bigplan.spec.optimizer import rules
from tests.runtime.harness import Run, loop_of, same, same_report
from tests.runtime.reference import DTYPES, UNIT, LayerState

# GEMMs, norms and attention add up to 256 terms in another order than the CPU, through a few
# layers: 1e-5 is some 170 unit roundoffs of fp32.
GRADIENT = 1e-5
# Muon's iteration carries larger relative errors into the weights. AdamW does where gradients are
# near zero, and a token that sees itself alone has queries and keys whose gradients are roundings,
# and who move by the whole rate for them: its moves are compared with what AdamW makes of moments.
MOVE = 1e-3
# bf16 has 8 bits: 0.4% a rounding, averaged over the tokens of a batch.
BF16_LOSS = 0.01
# In 16 bits ranks round their parts of a product, the plain loop rounds all of it: one rounding
# becomes two or three, of numbers as large or smaller. So two such results are less than this many
# times as far apart as the plain loop's is from one without such roundings.
#
# That holds of whatever is linear in gradients: moments (the second one nearly), SGD's moves. It
# does not hold of AdamW's moves. Where a gradient's terms cancel to less than their roundings, its
# sign is chance, and the weight moves by the whole rate one way or the other: at a rate of 0.01 a
# single element is 1e-2 off, 8,192 others that are right within 0.4% of moves of 4e-3 are 1.4e-3
# off together. Such an element may be in one comparison and not in the other: of 100 random plans
# with a norm of the embedding 13 had moves 3 to 160 times as far apart, and 76 to 100% of the
# squared distance in one element, while no moment was more than 2.9 times as far. So moves under
# AdamW are compared with what AdamW makes of the moments that the ranks have, element by element.
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
        for layer, (old, ours, expected) in enumerate(zip(before, after, plain.state, strict=True)):
            for number, (mine, plain_one) in enumerate(
                zip(ours.moments, expected.moments, strict=True)
            ):
                assert _apart(mine, plain_one) < GRADIENT * (number + 1)  # the second is of squares
            if plan.training.optimizer.name == "adamw":
                update = (layer, loop.applied, plain.learning_rate)
                wanted, most = adamw_weights(plan, update, old.weights, ours.moments)
                near = GRADIENT * (wanted - old.weights).norm() + most.norm()
                assert _distance(ours.weights, wanted) <= near
            else:
                moved = expected.weights - old.weights
                assert _apart(ours.weights - old.weights, moved) < MOVE


def check_in_16_bits(plan: Plan, run: Run) -> None:
    """Every step's gradients are as near to the plain loop's as those to ones without roundings.

    Those are of a loop in fp32 from the same master weights, so it knows no scale of a loss either.
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
        if plain.gradient_norm is None:  # the step was skipped
            same("skipped", before, after)
            continue
        for layer, states in enumerate(zip(before, after, plain.state, exact.state, strict=True)):
            _check_layer(plan, (layer, loop.applied, plain.learning_rate), states)


def _check_layer(
    plan: Plan, update: tuple[int, int, float], states: tuple[LayerState, ...]
) -> None:
    """A layer before a step, after it on the ranks, in the plain loop, and without roundings.

    `update` is the layer's number, the optimizer's step from 1, and the rate.
    """
    before, after = states[:2]
    linear = plan.training.optimizer.name == "sgd"
    for ours, one, two in zip(
        *(_changes(before, each, weights=linear) for each in states[1:]), strict=True
    ):
        assert _distance(ours, one) <= MORE * _distance(one, two)
    if not linear:
        expected, most = adamw_weights(plan, update, before.weights, after.moments)
        assert bool(((after.weights.double() - expected).abs() <= most).all())


def adamw_weights(
    plan: Plan, update: tuple[int, int, float], weights: Tensor, moments: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """What AdamW makes of weights by their new moments, and how far fp32 roundings lead; fp64.

    At most eight roundings of each term, counted generously.
    """
    (layer, step, rate), optimizer = update, plan.training.optimizer
    of_layer = rules(optimizer, plan.model, layer)
    parameters = plan.model.kinds()[plan.model.layer_sequence()[layer]]
    of_each = [of_layer[p.name] for p in parameters]
    counts = torch.tensor([torch.Size(p.shape).numel() for p in parameters], dtype=torch.int64)

    def every(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(counts)

    rates = rate * every([rule.learning_rate_factor for rule in of_each])
    first, second = (moment.double() for moment in moments)
    mean = first / (1 - optimizer.beta1**step)
    root = (second / (1 - optimizer.beta2**step)).sqrt()
    move = rates * mean / (root + optimizer.epsilon)
    kept = weights.double() * (1 - rates * every([rule.weight_decay for rule in of_each]))
    return kept - move, 8 * UNIT * (weights.double().abs() + move.abs())


def _changes(before: LayerState, after: LayerState, *, weights: bool) -> list[Tensor]:
    """A layer's moments after a step, and how the step moved its `weights`."""
    return [after.weights - before.weights] * weights + list(after.moments)


def _distance(ours: Tensor, plain: Tensor) -> float:
    return float((ours.double() - plain.double()).norm())
