"""A short soak with the native worker (benchmarks/kill_soak.py runs a longer one)."""

import random
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from bigplan.launcher.record import read_record
from bigplan.plan import save_plan
from bigplan.planner import Request, make_plan
from tests.launcher.soak import Soak
from tests.launcher.warm import BEFORE
from tests.runtime.harness import started
from tests.tiny import small_cluster, tiny_plan

STEPS = 40  # the second end is drawn at about step 20


def test_a_run_killed_interrupted_and_moved_to_another_plan_has_the_curve_of_one_that_was_not(
    warm: None, tmp_path: Path
) -> None:
    here = tiny_plan(1)
    pins: dict[str, str | int | float] = {
        "micro_batch": here.strategy.micro_batch,  # sums in the same order
        "accumulation_group": here.strategy.accumulation_group,
        "parameters": "host",
        "gradients": "host",
        "streamed": 0.5,
    }
    training = here.training
    away = make_plan(Request(here.model, training, small_cluster(1), pins, engine="native"))
    assert any(kind.streamed for kind in away.placement.stages[0].kinds.values())
    plans = [tmp_path / "here.yaml", tmp_path / "away.yaml"]
    for plan, path in zip((here, away), plans, strict=True):
        save_plan(plan, path)
    soak = Soak(plans, tmp_path, STEPS, 4, random.Random(3), before=BEFORE)
    run, ended = soak.interrupted(2, "ended")
    assert [text.split(",")[0] for text in soak.told[::2]] == [
        "ending the launch",
        "ending the interrupt",
    ]
    assert ended == 2
    record = read_record(run)
    assert [metric.step for metric in record.metrics] == list(range(1, STEPS + 1))
    with started(here, poison=False) as worker:
        losses = [worker.step().loss for _ in range(STEPS)]
        whole = worker.finish()
    assert [metric.loss for metric in record.metrics] == losses
    assert record.summary.digest == whole.digest
