from pathlib import Path

import pytest

from bigplan.launcher.checkpoints import (
    Pace,
    checkpoint_bytes,
    checkpoints,
    more_at_once,
    newest_step,
    prune,
    set_aside,
    step_of,
    sweep,
)
from bigplan.spec.experiment import LaunchSpec
from tests.runtime.plans import plan_of, tiny_model, tiny_training
from tests.tiny import tiny_plan


def written(run: Path, *names: str) -> Path:
    for name in names:
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "manifest.json").write_text("{}")
    return run


def test_what_is_a_checkpoint_and_which_is_the_newest(tmp_path: Path) -> None:
    assert checkpoints(tmp_path) == ()
    assert newest_step(tmp_path) is None
    written(tmp_path, "step-000100", "step-000020", "step-000120.partial", "step-000110.damaged")
    assert [step_of(path) for path in checkpoints(tmp_path)] == [20, 100]
    assert newest_step(tmp_path) == 100


def test_the_newest_are_kept(tmp_path: Path) -> None:
    written(tmp_path, *(f"step-{n:06}" for n in (2, 4, 999_999, 1_000_000)))
    prune(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-1000000",
        "step-999999",
    ]
    prune(tmp_path, 5)
    assert newest_step(tmp_path) == 1_000_000


def test_remains_are_swept_and_a_damaged_one_stays(tmp_path: Path) -> None:
    written(tmp_path, "step-000002", "step-000004.partial", "step-000001.old", "step-000003")
    set_aside(tmp_path / "checkpoints" / "step-000003")
    sweep(tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000002", "step-000003.damaged"]


def test_the_pace_by_steps() -> None:
    assert [n for n in range(1, 10) if Pace(3).due(n)] == [3, 6, 9]
    assert not any(Pace(0).due(n) for n in range(1, 10))


def test_the_pace_by_the_clock_is_ten_minutes() -> None:
    now = 0.0
    pace = Pace(None, lambda: now)
    due = []
    for minute in range(1, 35):
        now = 60.0 * minute
        if pace.due(minute):
            due.append(minute)
            pace.taken()
    assert due == [10, 20, 30]


@pytest.mark.parametrize(
    ("training", "each"),
    [
        ({}, 12),  # weights and two moments
        ({"precision": "bf16"}, 12),  # the same, the weights as master copies
        ({"optimizer": {"name": "sgd"}}, 8),  # weights and momentum
    ],
)
def test_bytes_of_a_parameter(training: dict[str, object], each: int) -> None:
    plan = tiny_plan()
    changed = tiny_training(4, **({"optimizer": plan.training.optimizer} | training))
    other = plan_of(tiny_model(), changed, plan.strategy, plan.placement)
    assert checkpoint_bytes(other) == each * other.model.parameter_count


def test_a_checkpoint_of_adapters_has_them_alone() -> None:
    plan = tiny_plan()
    changed = tiny_training(4, precision="bf16", lora={"rank": 4, "targets": ["q_proj"]})
    other = plan_of(tiny_model(), changed, plan.strategy, plan.placement)
    width = other.model.hidden
    assert checkpoint_bytes(other) == 12 * other.model.layers * 4 * 2 * width


def test_how_many_more_there_are_at_once(tmp_path: Path) -> None:
    plan = tiny_plan()  # a step takes 0.2 s at most

    def more(steps: int, every: int | None, keep: int) -> int:
        how = LaunchSpec(steps=steps, checkpoint_every=every, checkpoint_keep=keep)
        return more_at_once(tmp_path, plan, how)

    assert more(50, 10, 2) == 4  # kept, not known to be good yet, being written
    assert more(30, 10, 2) == 3
    assert more(10, 10, 2) == 1  # the last one alone
    assert more(30, 0, 2) == 1
    assert more(30, 10, 0) == 0
    assert more(30, None, 2) == 1
    assert more(1_000_000, None, 2) == 4
    for step in (10, 20):
        (tmp_path / "checkpoints" / f"step-{step:06}").mkdir(parents=True)
    assert more(100, 10, 2) == 2
    assert more(30, 0, 2) == 1  # written before an old one goes
    assert more(100, 10, 1) == 1
    assert more(20, None, 2) == 0  # nothing left to do
