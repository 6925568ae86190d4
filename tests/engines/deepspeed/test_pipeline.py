"""Pipelines as DeepSpeed plays them: its own schedule, what a step takes and what stages hold."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bigplan.engines import engine_of, make_plan
from bigplan.engines.deepspeed.decisions import Decisions
from bigplan.engines.deepspeed.memory import StageHoldings
from bigplan.engines.deepspeed.pipeline import MANY, PipedStep, PipelineTimes, Todo, order, played
from bigplan.engines.deepspeed.price import Phase
from bigplan.engines.deepspeed.refusals import refusal
from bigplan.engines.deepspeed.search import DeepSpeedSearch
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.program import Lane, Op
from tests.engines.deepspeed.test_search import Settings, request

UPDATE = (Phase(Op.UPDATE, 0, Lane.GPU_UPDATE, 0.5),)
ALIKE = PipelineTimes(1.0, 2.0, 0.0, (), UPDATE)
SPLIT: Settings = {"pp": 2, "zero": 1, "micro_batch": 1}


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
def test_the_order_is_deepspeeds(stages: int, micro_batches: int) -> None:
    pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    from deepspeed.runtime.pipe import schedule

    kinds = {
        "ForwardPass": (Op.FORWARD, Op.FORWARD),
        "BackwardPass": (Op.BACKWARD, Op.FORWARD),
        "SendActivation": (Op.SEND, Op.FORWARD),
        "SendGrad": (Op.SEND, Op.BACKWARD),
        "RecvActivation": (Op.RECV, Op.FORWARD),
        "RecvGrad": (Op.RECV, Op.BACKWARD),
    }
    for stage in range(stages):
        theirs = schedule.TrainSchedule(micro_batches, stages, stage)
        names = [command.name for slot in theirs for command in slot if command.name in kinds]
        ours = list(order(stage, stages, micro_batches))
        assert [(todo.op, todo.kind) for todo in ours] == [kinds[name] for name in names]
        for todo in ours:
            assert abs(todo.peer - stage) == 1 or todo.peer == Todo(Op.FORWARD, 0).peer


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 4, 9])
def test_stages_alike_have_the_bubble_of_one_forward_one_backward(
    stages: int, micro_batches: int
) -> None:
    """Without messages' time: (m + p - 1) (f + b), Narayanan et al. 2021."""
    step = PipedStep((ALIKE,) * stages, micro_batches, 0.0, 0, 0.0)
    assert step.seconds == pytest.approx((micro_batches + stages - 1) * 3.0 + 0.5)
    idle = step.seconds - sum(step.on_busiest().values())
    assert idle == pytest.approx((stages - 1) * 3.0)


def test_messages_are_not_hidden() -> None:
    """Stage 0 of two computes in turn with the other: of 8 messages of a step of 4, 7 are waited
    for; while one goes, nothing computes on either stage."""
    step = PipedStep((ALIKE, ALIKE), 4, 0.25, 10, 0.0)
    bare = PipedStep((ALIKE, ALIKE), 4, 0.0, 10, 0.0)
    assert step.seconds > bare.seconds + 4 * 0.25
    for stage in range(2):
        alone = sorted(
            (d.begin, d.end) for d in played(step.stages, 4, 0.25, 0.0) if d.stage == stage
        )
        assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(alone))
    assert step.moved() == {Lane.RECV: 40, Lane.SEND: 40}


def test_many_micro_batches_take_as_if_all_were_played() -> None:
    stages = (
        ALIKE,
        PipelineTimes(0.7, 2.5, 0.0, (), UPDATE),
        PipelineTimes(1.1, 1.9, 0.0, (), UPDATE),
    )
    for count in (2 * 3 + MANY + 1, 100, 333):
        step = PipedStep(stages, count, 0.03, 0, 0.0)
        assert step.seconds == pytest.approx(step.timeline().seconds, rel=1e-9)
        assert sum(step.by_lane().values()) == pytest.approx(step.seconds, rel=1e-9)


def test_the_update_waits_for_every_stage_and_a_shared_table() -> None:
    slow = PipelineTimes(1.0, 2.0, 0.0, (Phase(Op.REDUCE, 0, Lane.COMM, 2.0),), UPDATE)
    step = PipedStep((ALIKE, slow), 2, 0.0, 0, 1.0)
    by_op = {(e.stage, e.op): e for e in step.timeline().events if e.op not in (Op.SEND, Op.RECV)}
    table = by_op[0, Op.TENSOR_REDUCE]
    assert table.end == by_op[1, Op.TENSOR_REDUCE].end
    reduced = by_op[1, Op.REDUCE]
    assert by_op[0, Op.UPDATE].end == by_op[1, Op.UPDATE].end == reduced.end + 0.5


def test_stages_hold_the_model_and_what_is_under_way() -> None:
    asked = request({**SPLIT, "recompute": "none"}, gpus=8)
    search = DeepSpeedSearch(asked)
    way = next(way for way in search._ways() if way.strategy.pp == 2)
    graph, _ = search._graph(way.strategy, 1024)
    sizes = search.tried(way).held.sizes
    first, last = (StageHoldings(graph, asked.training, way, sizes, at) for at in range(2))
    assert first.parameters + last.parameters == asked.model.parameter_count
    assert (first.in_flight, last.in_flight) == (2, 1)
    assert first.gpu()["activations"] > 1.5 * last.gpu()["activations"]
    # The table is the largest parameter: made in fp32, and cast to 16 bits.
    assert first.first_values == (4 + 2) * asked.model.vocab * asked.model.hidden


def test_a_pipelines_plan_is_complete() -> None:
    plan = make_plan(request({**SPLIT, "recompute": "full"}, gpus=8))
    assert plan.config["json"]["pipeline"] == {"stages": 2, "activation_checkpoint_interval": 1}
    assert not plan.config["json"]["zero_optimization"]["overlap_comm"]
    assert [stage.kinds.keys() for stage in plan.placement.stages] == [
        {"embedding", "block"},
        {"block", "head"},
    ]
    assert {use.stage for use in plan.predicted.memory} == {0, 1}
    parts = plan.predicted.parts
    together = parts.compute + parts.recompute + parts.update + parts.bubble + parts.waiting
    assert together == pytest.approx(plan.predicted.step_seconds)
    assert parts.bubble > 0
    assert engine_of(plan).timeline(plan).seconds == pytest.approx(plan.predicted.step_seconds)
    again = Decisions.of(plan)
    assert DeepSpeedSearch(request(gpus=8)).tried(again).decisions == again


def test_the_ends_of_a_pipeline_may_be_smaller() -> None:
    """A head of as many words as nothing else: the last stage has fewer blocks."""
    plan = make_plan(request({"pp": 8, "micro_batch": 1}, gpus=8, model="llama-3-8b"))
    blocks = [stage.kinds["block"].layers for stage in plan.placement.stages]
    assert sum(blocks) == 32
    assert blocks[-1] < blocks[1]


def test_what_its_pipelines_do_not_take() -> None:
    asked = request(gpus=8)
    for strategy, words in (
        (Strategy(dp=4, pp=2, zero=2), "ZeRO 0 or 1, not 2"),
        (Strategy(dp=4, pp=2, zero=0), "use zero 1 with dp 4"),
        (Strategy(dp=1, pp=2, vpp=2), "vpp 2 needs --engine native"),
        (Strategy(dp=1, pp=2, accumulation_group=2), "accumulation_group 2"),
    ):
        assert words in (refusal(asked.model, asked.training, strategy) or "")
    way = Decisions(Strategy(dp=1, pp=2), 3, state=Tier.NVME)
    assert "pipelines need ZeRO stage 0 or 1, not 3" in "; ".join(way.problems())
