"""Plan files: written the same way every time, read back equal, refused when edited."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bigplan.errors import InputError
from bigplan.plan import FORMAT, Plan, digest, load_plan, plan_text, save_plan
from bigplan.planner import Request, make_plan
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training


@pytest.fixture(scope="module")
def plan() -> Plan:
    training = Training(sequence_length=128, global_batch=8)
    return make_plan(Request(find_model("tiny-llama-test"), training, find_cluster("h200-1x")))


def test_round_trip(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.yaml")
    again = load_plan(tmp_path / "plan.yaml")
    assert again == plan
    assert plan_text(again) == plan_text(plan) == (tmp_path / "plan.yaml").read_text()
    assert hash(again) == hash(plan)


def test_a_plan_is_plain_yaml_with_the_decisions_first(plan: Plan) -> None:
    data = yaml.safe_load(plan_text(plan))
    keys = list(data)
    assert keys[0] == "format"
    assert max(map(keys.index, ("strategy", "placement", "predicted"))) < keys.index("cluster")
    assert set(data["inputs"]) == {"model", "training", "cluster"}


def test_nothing_of_this_machine_is_in_a_plan(plan: Plan) -> None:
    text = plan_text(plan)
    for private in (str(Path.cwd()), str(Path.home())):
        assert private not in text


@pytest.mark.parametrize(
    ("section", "old", "new"),
    [
        ("model", "ffn: 128", "ffn: 256"),
        ("training", "learning_rate: 0.0003", "learning_rate: 0.001"),
        ("cluster", "gpus_per_node: 1", "gpus_per_node: 2"),
    ],
)
def test_edited_inputs_are_detected(
    plan: Plan, tmp_path: Path, section: str, old: str, new: str
) -> None:
    path = tmp_path / "plan.yaml"
    text = plan_text(plan)
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError) as error:
        load_plan(path)
    assert f"{path}: `{section}` was changed after the plan was made" in str(error.value)
    assert "run `bigplan plan` again" in str(error.value)


def test_unknown_keys_and_impossible_placements_are_named_with_their_line(
    plan: Plan, tmp_path: Path
) -> None:
    path, text = tmp_path / "plan.yaml", plan_text(plan)
    path.write_text(text.replace("placement:", "placment:", 1))
    with pytest.raises(InputError) as error:
        load_plan(path)
    line = text[: text.index("placement:")].count("\n") + 1
    assert f"{path}:{line}: " in str(error.value)
    assert "placement" in str(error.value)  # what was meant
    path.write_text(text.replace("layers: 2\n", "layers: 3\n", 1))
    with pytest.raises(InputError, match="places 2 of 3 layers; place each once"):
        load_plan(path)
    path.write_text(text.replace(f"format: {FORMAT}", "format: 2"))
    with pytest.raises(
        InputError,
        match=r"plan\.yaml:1: the plan has format 2, .* reads \d+; make a new one.*A run",
    ):
        load_plan(path)


def test_another_file_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text("model: llama-3-8b\ncluster: dgx-h100\n")
    with pytest.raises(InputError, match=r"experiment\.yaml is no plan: .*bigplan plan") as error:
        load_plan(path)
    assert "missing key" not in str(error.value)


def test_files_that_cannot_be_read_or_written(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write the plan to .*; name another file"):
        save_plan(plan, tmp_path / "nowhere" / "plan.yaml")
    with pytest.raises(InputError, match=r"missing\.yaml"):
        load_plan(tmp_path / "missing.yaml")


def test_digests_do_not_depend_on_how_a_description_was_written() -> None:
    model = find_model("tiny-llama-test")
    data = model.model_dump()
    turned = type(model).model_validate(dict(reversed(data.items())))
    assert digest(turned) == digest(model)
    assert digest(model.model_copy(update={"ffn": 256})) != digest(model)
