"""A deterministic run on a GPU has the same bits every time."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.plan import Plan
from tests.runtime.checkpoints import away, on_device, passing, resident, running
from tests.runtime.harness import same, state_of
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.runtime.reference import State
from tests.toys import kind_placement

pytestmark = pytest.mark.gpu

STEPS = 4
LENGTH = 2048  # tokens, of which attention's backward takes many blocks a row


def _run(plan: Plan) -> tuple[list[tuple[float, float | None]], State]:
    with running(on_device(plan, "cuda")) as (worker, _):
        results = [worker.step() for _ in range(STEPS)]
        worker.finish()
        return [(result.loss, result.gradient_norm) for result in results], state_of(worker)


def _long(**changes: object) -> Plan:
    """Sequences over which attention's backward adds up in no fixed order unless it is told to."""
    model = tiny_model(hidden=256, heads=4, kv_heads=2, ffn=512, max_sequence_length=LENGTH)
    training = tiny_training(2, precision="bf16", sequence_length=LENGTH, **changes)
    placement = placed(embedding=kind_placement(1), block=kind_placement(2), head=kind_placement(1))
    return plan_of(model, training, Strategy(dp=1), placement)


@pytest.mark.parametrize(
    "plan",
    [
        _long(deterministic=True),
        resident(deterministic=True),
        away(deterministic=True),
        away(Tier.NVME, chunk=5_000, deterministic=True),
        passing(chunk=5_000, deterministic=True),
    ],
)
def test_twice_the_same(plan: Plan) -> None:
    """`running` poisons memory that is freed, so reading any of it would show, too."""
    first, second = _run(plan), _run(plan)
    assert first[0] == second[0]
    same("twice", first[1], second[1])
