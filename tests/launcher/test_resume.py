from pathlib import Path

import pytest

from bigplan.errors import InputError, RefusedError
from bigplan.launcher.record import Asked, write_start
from bigplan.launcher.resume import read_resumable, refuse_other_training, resume_hint
from bigplan.plan import Plan
from bigplan.planner import simulate_plan
from bigplan.spec.experiment import LaunchSpec
from bigplan.spec.lora import Lora
from bigplan.spec.schedule import Schedule
from bigplan.spec.training import ValidationSpec
from tests.tiny import tiny_plan
from tests.wording import tells


def changed(**training: object) -> Plan:
    plan = tiny_plan()
    return plan.model_copy(update={"training": plan.training.model_copy(update=training)})


def refuse_other(before: Plan, now: Plan) -> None:
    refuse_other_training(before, now.model, now.training)


def test_a_run_reads_back(tmp_path: Path) -> None:
    how = LaunchSpec(steps=7, checkpoint_every=3)
    write_start(tmp_path, tiny_plan(), how, Asked(nodes=1), simulate_plan(tiny_plan()))
    run = read_resumable(tmp_path)
    assert (run.folder, run.plan, run.how) == (tmp_path, tiny_plan(), how)


def test_what_is_no_run_or_an_old_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no run of"):
        read_resumable(tmp_path)
    write_start(tmp_path, tiny_plan(), LaunchSpec(), Asked(nodes=1), simulate_plan(tiny_plan()))
    (tmp_path / "launch.json").unlink()
    with pytest.raises(InputError, match="without checkpoints"):
        read_resumable(tmp_path)


def test_every_difference_is_named() -> None:
    before = tiny_plan()
    optimizer = before.training.optimizer.model_copy(update={"learning_rate": 0.5})
    with pytest.raises(RefusedError) as caught:
        refuse_other(before, changed(optimizer=optimizer, clip_norm=None))
    assert "optimizer.learning_rate was 0.0003 and is 0.5" in str(caught.value)
    assert "clip_norm was 1.0 and is null" in str(caught.value)  # as a description has it
    with pytest.raises(RefusedError, match=r"lora was null and is {rank: 2, .*targets: null"):
        refuse_other(before, changed(lora=Lora(rank=2)))
    other = before.model_copy(update={"model": before.model.model_copy(update={"layers": 3})})
    with pytest.raises(RefusedError, match="with that model: layers was 2 and is 3"):
        refuse_other(before, other)


def test_steps_may_change_unless_the_learning_rate_follows_them() -> None:
    refuse_other(changed(steps=5), changed(steps=50))
    cosine = Schedule(name="cosine")
    with pytest.raises(RefusedError, match="steps was 5 and is 50"):
        refuse_other(changed(steps=5, schedule=cosine), changed(steps=50, schedule=cosine))
    until = Schedule(name="cosine", decay_steps=40)
    refuse_other(changed(steps=5, schedule=until), changed(steps=50, schedule=until))


def test_the_way_on_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "a b"
    (run / "checkpoints" / "step-000012").mkdir(parents=True)
    hint = resume_hint(run)
    assert tells(hint, "step 12", "bigplan launch --resume 'runs/a b'")


def test_how_long_the_whole_training_is_may_change() -> None:
    refuse_other(tiny_plan(), changed(tokens=10**12))


def test_validation_may_change() -> None:
    some = ValidationSpec(data="a", every=2)
    refuse_other(changed(validation=some), changed(validation=ValidationSpec(data="b", every=3)))
    refuse_other(changed(validation=None), changed(validation=some))


def test_the_folder_of_frozen_weights_may_move() -> None:
    lora = {"weights": "a", "lora": Lora(rank=2)}
    refuse_other(changed(**lora), changed(**lora | {"weights": "b"}))
    with pytest.raises(RefusedError, match="weights was a and is null"):
        refuse_other(changed(**lora), changed(**lora | {"weights": None}))
    with pytest.raises(RefusedError, match="weights was a and is b"):  # which would not be read
        refuse_other(changed(weights="a"), changed(weights="b"))
