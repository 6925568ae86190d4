"""What a training reads: where it is missing a plan warns and a launch refuses before planning."""

import json
import re
from pathlib import Path

import pytest
import yaml

from bigplan.cli import run
from bigplan.plan import plan_text, save_plan
from bigplan.spec.catalog import find_model
from bigplan.spec.hf.config import to_hf_config
from tests.cli.conftest import Run
from tests.launcher.fakes import without_ray
from tests.tiny import capped_plan, write_cluster

__all__ = ["without_ray"]
pytestmark = pytest.mark.usefixtures("without_ray")

MISSING = [
    ({"data": "corpus"}, "training.data: data .*corpus cannot be read .* name a prepared folder"),
    ({"data": "rows.jsonl"}, "run `bigplan data prepare .*rows.jsonl"),
    ({"validation": {"data": "held-out", "every": 2}}, "training.validation: data .*held-out"),
    ({"weights": "tiny-hf"}, "tiny-hf is no folder"),
]


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    write_cluster(tmp_path)
    return tmp_path / "e.yaml"


def _write(path: Path, training: dict[str, object]) -> None:
    keys = {"sequence_length": 32, "global_batch": 4, "precision": "fp32", "steps": 2} | training
    path.write_text(
        json.dumps({"model": "tiny-llama-test", "cluster": "small.yaml", "training": keys})
    )


@pytest.mark.parametrize(("training", "message"), MISSING)
def test_a_plan_says_what_is_missing_and_stands(
    bigplan: Run, experiment: Path, training: dict[str, object], message: str
) -> None:
    _write(experiment, training)
    code, out, err = bigplan("plan", experiment, "--json")
    assert code == 0
    assert json.loads(out)["step_seconds"] > 0
    told = " ".join(err.split())
    assert re.search(rf"warning: .*{message}", told)


@pytest.mark.parametrize(("training", "message"), MISSING)
def test_a_launch_here_refuses_what_is_missing_before_it_plans(
    bigplan: Run,
    experiment: Path,
    monkeypatch: pytest.MonkeyPatch,
    training: dict[str, object],
    message: str,
) -> None:
    monkeypatch.setattr(run, "plan_experiment", _never)
    _write(experiment, training)
    code, out, err = bigplan("launch", experiment)
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert not Path("runs").exists()


def _never(*arguments: object, **options: object) -> None:
    raise AssertionError("planned")


def test_data_of_another_vocabulary_is_refused_too(bigplan: Run, experiment: Path) -> None:
    Path("wide.txt").write_bytes(bytes(range(1, 256)) * 8)
    _write(experiment, {"data": "wide.txt"})
    narrow = bigplan("models", "tiny-llama-test")[1].replace("vocab: 256", "vocab: 200")
    Path("narrow.yaml").write_text(narrow)
    code, _, err = bigplan("launch", experiment, "--model", "narrow.yaml")
    assert code == 2
    assert "vocabulary of at least 256" in err


@pytest.mark.parametrize(("longer", "told"), [(0, False), (1, True)])
def test_positions_that_a_model_does_not_have_are_told(
    bigplan: Run, experiment: Path, longer: int, told: bool
) -> None:
    Path("weights").mkdir()
    length = find_model("tiny-llama-test").max_sequence_length + longer
    for weights, what in (("weights", "has weights for"), (None, "is described with")):
        _write(experiment, {"sequence_length": length, "weights": weights})
        code, _, err = bigplan("plan", experiment)
        assert code == 0
        found = " ".join(err.split())
        assert (f"warning: sequence_length {length} is longer" in found) == told
        assert (what in found) == told


def test_weights_of_another_model_are_told(bigplan: Run, experiment: Path) -> None:
    """Of which their config.json tells: nothing else of them is read."""
    Path("weights").mkdir()
    config = to_hf_config(find_model("tiny-llama-test").model_copy(update={"ffn": 1024}))
    Path("weights/config.json").write_text(json.dumps(config))
    _write(experiment, {"weights": "weights"})
    code, _, err = bigplan("plan", experiment)
    assert code == 0
    assert re.search(
        "warning: .*config.json has intermediate_size 1024 instead of 128", " ".join(err.split())
    )


def test_what_is_there_is_neither_told_nor_refused(bigplan: Run, experiment: Path) -> None:
    Path("text.txt").write_bytes(b"here it is. " * 100)
    validation = {"data": "bundled", "every": 1, "batches": 1}
    _write(experiment, {"data": "text.txt", "validation": validation})
    code, _, err = bigplan("plan", experiment)
    assert (code, err) == (0, "")
    assert bigplan("launch", experiment)[0] == 0


def test_a_ray_cluster_may_have_what_this_machine_lacks(
    bigplan: Run, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "plan_experiment", _never)
    _write(experiment, {"data": "corpus"})
    with pytest.raises(AssertionError, match="planned"):
        bigplan("launch", experiment, "--address", "10.0.0.1:6379")


def _edited(key: str, value: object) -> None:
    """capped_plan() in plan.yaml with one value changed by hand."""
    data = yaml.safe_load(plan_text(capped_plan()))
    inner = data
    *path, last = key.split("/")
    for name in path:
        inner = inner[int(name) if name.isdigit() else name]
    assert inner[last] != value
    inner[last] = value
    Path("plan.yaml").write_text(yaml.safe_dump(data, sort_keys=False))


BLOCK = "placement/stages/0/kinds/block"
PLAN_READERS = pytest.mark.parametrize("command", ["simulate", "explain", "launch"])


@PLAN_READERS
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (f"{BLOCK}/parameters", {"gpu": 8, "host": -2}, "parameters.host` is -2"),
        ("strategy/dp", 4, "strategy.dp: 4 is no way to split tiny-llama-demo"),
        ("strategy/micro_batch", 3, "strategy.micro_batch: 3 is no way to split"),
        ("strategy/accumulation_group", 3, "strategy.accumulation_group: 3 is no way to split"),
        (f"{BLOCK}/parameters", {"gpu": 6}, "gpu memory per GPU, .* more than the 23.28 MiB"),
    ],
)
def test_an_edited_plan_that_cannot_be_is_refused(
    bigplan: Run, command: str, key: str, value: object, message: str
) -> None:
    _edited(key, value)
    code, out, err = bigplan(command, "plan.yaml")
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert not Path("runs").exists()


@PLAN_READERS
def test_promises_that_were_edited_are_told_and_made_again(bigplan: Run, command: str) -> None:
    save_plan(capped_plan(), Path("plan.yaml"))
    code, out, err = bigplan(command, "plan.yaml")
    assert (code, err) == (0, "")
    _edited("predicted/memory/0/used_bytes", 1)
    code, again, err = bigplan(command, "plan.yaml")
    assert code == 0
    assert "give the predicted.memory.0.used_bytes that it states" in err
    if command == "launch":
        assert (Path("runs") / "tiny-llama-demo-2" / "plan.yaml").read_text() == plan_text(
            capped_plan()
        )
    else:
        assert again == out
