"""What the terminal shows; widths are wide so that no cell wraps."""

from dataclasses import replace
from pathlib import Path

import pytest

from bigplan.graph.strategy import Strategy
from bigplan.graph.told import strategy_text
from bigplan.launcher.record import MemoryRow, Metric, Record, Summary
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.plan import Plan
from bigplan.planner import simulate_plan
from bigplan.report.decision import decision
from bigplan.report.plan_report import plan_report, step_report
from bigplan.report.run_report import headline_lines, run_report
from bigplan.report.stages import stages_of
from bigplan.report.text import bar, seconds_text
from bigplan.runnable import Runnable
from bigplan.timeline import Event, Timeline
from tests.report.shown import shown
from tests.report.test_operators import planned
from tests.tiny import tiny_plan
from tests.wording import tells


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.strip().startswith(name))


@pytest.fixture
def plan() -> Plan:
    return tiny_plan()


def test_a_plan_is_told_in_one_sentence(plan: Plan) -> None:
    text = decision(plan, stages_of(plan))
    assert tells(text, "tiny-llama-test", "106.8 k parameters", "2 x ", "data parallel 2")
    assert tells(text, "4 sequences", "32 tokens", "fp32")


def test_the_summary_has_every_part(plan: Plan) -> None:
    text = shown(plan_report(plan, 0.25, Runnable(plan)))
    for part in (
        "step time",
        "tokens/s",
        "MFU",
        "Where tensors live",
        "Memory",
        "Time by resource",
        "The step of the busiest GPU",
        "no plan takes less than",
        "in 250 ms",
        "yes, with `bigplan launch`",
    ):
        assert part in text


def test_equal_stages_share_a_row(plan: Plan) -> None:
    block, end = all_on_gpu(1), all_on_gpu(1)
    halves = Placement(
        stages=(
            StagePlacement(kinds={"embedding": end, "block": block}),
            StagePlacement(kinds={"block": block, "head": end}),
        )
    )
    strategy = Strategy(dp=1, pp=2)
    piped = plan.model_copy(
        update={
            "strategy": strategy,
            "placement": halves,
            "executable": {"native": "not pp 2", "deepspeed": "no"},
        }
    )
    text = shown(plan_report(piped, 1.0, Runnable(None, "not pp 2", "none fits")))
    assert "pipeline 2" in text
    assert tells(text, "Runs today: no", "not pp 2", "none fits")
    assert row(text, "0-1")[:3] == ["0-1", "parameters", "all:"]
    assert row(text, "activations")[:3] == ["activations", "1", "kept:"]


def all_on_gpu(layers: int) -> KindPlacement:
    everything = {Tier.GPU: layers}
    tensors = dict.fromkeys(("parameters", "gradients", "optimizer"), everything)
    return KindPlacement.model_validate(
        {"layers": layers, "activations": {"none": everything}, **tensors}
    )


def test_strategies_in_words() -> None:
    assert strategy_text(Strategy(dp=1)) == "one GPU, micro-batch 1"
    whole = Strategy(dp=4, tp=2, zero=3, accumulation_group=8)
    parts = ("data parallel 4", "tensor parallel 2", "ZeRO 3", "micro-batch 1", "8 micro-batches")
    assert tells(strategy_text(whole), *parts)


def test_bars_and_seconds() -> None:
    assert (bar(1, 2).count("█"), bar(5, 2).count("░"), bar(1, 0).count("█")) == (8, 0, 0)
    assert [seconds_text(s) for s in (0.0123456, 92.123, 6000.0)] == [
        "12.3 ms",
        "92.1 s",
        "1.667 h",
    ]


def record(plan: Plan, measured: Timeline | None, status: str = "finished") -> Record:
    metrics = (
        Metric(step=1, loss=5.5, seconds=2.0, tokens_per_second=64.0),
        Metric(step=2, loss=4.25, seconds=1.0, tokens_per_second=128.0),
    )
    memory = MemoryRow(tier="gpu", scope="gpu", predicted=200, measured=100, capacity=400)
    summary = Summary.model_validate(
        {
            "status": status,
            "steps": 2,
            "ranks": 2,
            "seconds": 3.0,
            "predicted_step_seconds": 0.5,
            "measured_step_seconds": 1.0,
            "memory": (memory,),
            "versions": {"torch": "2"},
            "notes": ("disk writes were buffered",),
            "digest": "ab",
        }
    )
    return Record(Path("runs/tiny-1"), plan, metrics, simulate_plan(plan), measured, summary)


def test_a_run_shows_predicted_beside_measured(plan: Plan) -> None:
    predicted = simulate_plan(plan)
    slower = tuple(
        Event(e.stage, e.lane, e.op, e.layer, e.micro_batch, 2 * e.start, 2 * e.end)
        for e in predicted.events
    )
    text = shown(run_report(record(plan, Timeline(slower, 2 * predicted.seconds))))
    assert "loss 5.5000 to 4.2500" in text
    assert "x2.00" in text
    assert row(text, "gpu compute")[-1] == "2.00"
    assert row(text, "backward")[-1] == "2.00"
    assert "forward's kernels" not in text  # nothing is streamed
    assert row(text, "GPU per GPU")[-3:] == ["0.50", "400", "B"]
    assert "Note: disk writes were buffered" in text


def test_a_run_is_told_by_resource_on_both_sides() -> None:
    plan = planned("streamed")
    text = shown(run_report(record(plan, simulate_plan(plan))))
    for name in ("host to device", "device to host", "gpu update"):
        assert row(text, name)[-1] == "1.00"
    assert "state to" not in text
    assert "waiting for the forward's kernels" in " ".join(text.split())
    assert row(text, "state_in")[-1] == "1.00"  # by kind of action it is told apart
    for told in (plan_report(plan, 0.25, Runnable(plan)), step_report(plan.predicted)):
        assert "host to device" in shown(told)
        assert "state to" not in shown(told)


def test_an_action_that_only_one_side_has(plan: Plan) -> None:
    event = Event(0, "gpu compute", "surprise", 0, 0, 0.0, 1.0)
    text = shown(run_report(record(plan, Timeline((event,), 1.0))))
    assert row(text, "surprise") == ["surprise", "-", "1", "s", "-"]
    assert row(text, "backward")[-2:] == ["-", "-"]


def test_actions_at_which_nothing_runs_are_not_shown(plan: Plan) -> None:
    freed = Event(0, "free", "free", 0, 0, 0.0, 1.0)
    work = Event(0, "gpu compute", "backward", 0, 0, 0.0, 1.0)
    text = shown(run_report(record(plan, Timeline((freed, work), 1.0))))
    assert "free" not in text
    assert row(text, "backward")[-3:-1] == ["1", "s"]


def test_a_run_that_ended_early_says_so(plan: Plan) -> None:
    text = shown(run_report(record(plan, None, "interrupted")))
    assert "interrupted" in text
    assert "by resource" not in text


def test_a_run_shows_how_the_training_went(plan: Plan) -> None:
    run = record(plan, None, "running")
    more = {"data_seconds": 0.25, "validation_loss": 4.125, "skipped": True}
    metrics = (*run.metrics, run.metrics[1].model_copy(update={"step": 3, "loss": None, **more}))
    summary = run.summary.model_copy(
        update={"target_steps": 9, "checkpoint": 2, "resumed": (1, 2), "seconds": 50.0}
    )
    text = shown(run_report(replace(run, metrics=metrics, summary=summary)))
    for part in (
        "3 of 9 steps in 4 s, running, or killed",
        "loss 5.5000 to not finite",
        "validation loss 4.1250 after step 3",
        "waiting for data: 250 ms a step, 25% of the time",
        "1 of 3 steps was skipped",
        "newest checkpoint: step 2; resumed after step 1 and 2",
        f"MFU {100 * plan.predicted.mfu * plan.predicted.step_seconds:.3g}%",
    ):
        assert part in text
    assert text.count("4.1250") == 1  # of the only validation


def test_losses_are_those_of_steps_that_count_a_token(plan: Plan) -> None:
    whole = record(plan, None)
    none = Metric(step=1, uncounted=True, seconds=1.0, tokens_per_second=64.0)
    some = replace(whole, metrics=(none, *whole.metrics, none))
    assert "loss 5.5000 to 4.2500" in "\n".join(headline_lines(some))
    assert "loss of no token" in "\n".join(headline_lines(replace(whole, metrics=(none, none))))
