"""Runs that train adapters beside a frozen model compute what a plain torch loop computes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.content import ADAPTERS
from bigplan.graph.build import build_graph
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement, Tier
from bigplan.plan import Plan
from bigplan.runtime.context import Context
from bigplan.runtime.weights.digest import stage_adapters
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.lora import possible_targets
from bigplan.spec.training import ValidationSpec
from tests.examples import examples
from tests.runtime.harness import context_of, started
from tests.runtime.linear.lora_loop import LoraLoop
from tests.runtime.linear.lora_ranks import IN_TURN, LORA, STATES, frozen, plans, run_rank
from tests.runtime.plans import carrying, models, placed, plan_of, tiny_model, tiny_training
from tests.runtime.processes import start
from tests.toys import placements

STEPS = 4
CLOSE = 1e-5  # fp32, sums in another order


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def plan(
    placement: Placement | None = None, strategy: Strategy | None = None, **training: object
) -> Plan:
    """Two blocks; all on the GPU unless placed elsewhere."""
    given = {"lora": LORA, **training}
    return plan_of(
        tiny_model(),
        tiny_training(4, **given),
        strategy or Strategy(dp=1, accumulation_group=2),
        placement or placed(embedding=frozen(1), block=frozen(2), head=frozen(1)),
    )


def adapters_of(worker: NativeWorker) -> dict[str, Tensor]:
    """By name in the model, as this rank has them."""
    context = context_of(worker)
    return _named(context, stage_adapters(context))


def _named(context: Context, flat: Tensor) -> dict[str, Tensor]:
    return {
        name: flat[start : start + rows * columns].view(rows, columns).clone()
        for name, (start, rows, columns) in context.offsets[ADAPTERS].items()
    }


def check_steps(found: Plan, steps: int = STEPS) -> None:
    """Losses and adapters of every step are the plain loop's."""
    loop = LoraLoop(found)
    with started(found) as worker:
        for name, value in adapters_of(worker).items():
            assert torch.equal(value, loop.adapters[name].detach()), name
        for _ in range(steps):
            assert worker.step().loss == pytest.approx(loop.step(), rel=CLOSE)
        worker.finish()
        for name, value in adapters_of(worker).items():
            exact = loop.adapters[name].detach()
            assert float((value - exact).norm()) < 10 * CLOSE * float(exact.norm()), name


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_a_resident_run_is_the_plain_loop(clip_norm: float | None) -> None:
    check_steps(plan(clip_norm=clip_norm))


def test_validation_sees_the_adapters() -> None:
    validation = ValidationSpec(data="bundled", batches=2)
    found = plan(AWAY["host"], clip_norm=1e-3, validation=validation)
    loop = LoraLoop(found)
    with started(found) as worker:
        before = worker.evaluate()
        for _ in range(STEPS):
            worker.step()
            loop.step()
        after = worker.evaluate()
        worker.step()
    assert after == pytest.approx(loop.validated(), rel=CLOSE)
    assert abs(after - before) > 100 * CLOSE


AWAY = {
    "host": placed(
        embedding=frozen(1, Tier.HOST), block=frozen(2, Tier.HOST), head=frozen(1, Tier.HOST)
    ),
    "nvme": placed(
        embedding=frozen(1), block=frozen(2, Tier.NVME), head=frozen(1, Tier.HOST), slots=2
    ),
    "activations": placed(
        embedding=frozen(1),
        block=frozen(2, Tier.HOST, Recompute.NONE, Tier.HOST),
        head=frozen(1),
    ),
}


@pytest.mark.parametrize(("name", "clip_norm"), [("nvme", None), *((name, 1e-3) for name in AWAY)])
def test_frozen_weights_may_be_elsewhere(name: str, clip_norm: float | None) -> None:
    check_steps(plan(AWAY[name], clip_norm=clip_norm))


@pytest.mark.parametrize(
    ("recompute", "activations"),
    [*((each, Tier.HOST) for each in Recompute), (Recompute.NONE, Tier.GPU)],
)
def test_blocks_may_be_recomputed(recompute: Recompute, activations: Tier) -> None:
    block = frozen(2, Tier.HOST, recompute, activations)
    check_steps(plan(placed(embedding=frozen(1), block=block, head=frozen(1))))


@st.composite
def _any(draw: st.DrawFn) -> Plan:
    """Any model, targets and placement, two micro-batches or more a step."""
    model = draw(models() | carrying())
    targets = draw(
        st.none() | st.lists(st.sampled_from(possible_targets(model)), min_size=1, unique=True)
    )
    strategy = Strategy(
        dp=1, micro_batch=draw(st.integers(1, 2)), accumulation_group=draw(st.integers(1, 2))
    )
    batch = strategy.micro_batch * strategy.accumulation_group * draw(st.integers(1, 2))
    if batch > strategy.micro_batch:  # the plain loop balances experts over all tokens of a step
        model = model.model_copy(update={"router_loss": 0.0})
    training = tiny_training(
        batch,
        clip_norm=draw(st.sampled_from((None, 1e-3))),
        lora={"rank": draw(st.sampled_from((1, 4))), "targets": targets},
    )
    placement = draw(placements(build_graph(model, training, strategy), free=True))
    return plan_of(model, training, strategy, placement)


@given(_any())
@settings(
    max_examples=examples(20),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_plan_trains_adapters_as_a_plain_loop_does(found: Plan) -> None:
    """Losses alone: where a gradient is zero but for roundings, AdamW makes a step of them."""
    loop = LoraLoop(found)
    with started(found) as worker:
        for _ in range(STEPS):
            assert worker.step().loss == pytest.approx(loop.step(), rel=10 * CLOSE)


@pytest.mark.parametrize(
    ("ranks", "clip_norm", "parts", "dropout"),
    [
        (2, None, {}, 0.0),
        (4, 1e-3, {}, 0.0),
        (2, 1e-3, STATES, 0.0),
        (2, None, {}, 0.3),
        (2, 1e-3, STATES, 0.3),
    ],
)
def test_ranks_train_as_one_does_and_go_on_under_another_split(
    ranks: int,
    clip_norm: float | None,
    parts: dict[str, object],
    dropout: float,
    tmp_path: Path,
    subtests: pytest.Subtests,
) -> None:
    every = plans(ranks, clip_norm=clip_norm, parts=parts, dropout=dropout)
    (tmp_path / "plans").write_bytes(pickle.dumps(every))
    start(run_rank, tmp_path, ranks)
    loop = LoraLoop(next(iter(every.values())))
    alone = []
    for _ in range(min(IN_TURN, len(every))):
        loss = loop.step()
        alone.append(
            (loss, {name: value.detach().clone() for name, value in loop.adapters.items()})
        )
    for number, (name, plan) in enumerate(every.items()):
        with subtests.test(name):
            runs = [
                torch.load(tmp_path / f"{name}.{rank}.pt", weights_only=False)
                for rank in range(ranks)
            ]
            assert len({run.digest for run in runs}) == 1
            loss, adapters = alone[number % IN_TURN]
            for run in runs:
                assert run.done == number % IN_TURN
                assert run.loss == pytest.approx(loss, rel=CLOSE)
                for adapter, (held, values) in run.adapters.items():
                    exact = adapters[adapter][held.in_matrix]
                    assert float((values - exact).norm()) < 10 * CLOSE * float(exact.norm()), (
                        adapter
                    )
            found = set().union(*(run.adapters for run in runs))
            assert found == set(loop.adapters), plan.strategy
