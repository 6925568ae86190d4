import json
from pathlib import Path

import pytest

from bigplan.errors import InputError
from bigplan.spec.catalog import find_model
from bigplan.spec.experiment import load_experiment
from bigplan.spec.hf.cache import cached_config, is_id
from bigplan.spec.sweep import load_study
from tests.wording import tells

CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 300}
CONFIG |= {"n_positions": 128}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two snapshots of one model, of which `main` is the older one."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    for number, layers in (("a" * 40, 3), ("b" * 40, 5)):
        snapshot = tmp_path / "hub" / "models--some-org--A.model_1" / "snapshots" / number
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(CONFIG | {"n_layer": layers}))
    refs = tmp_path / "hub" / "models--some-org--A.model_1" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    return tmp_path / "hub"


def test_an_id_is_found_as_main_has_it(hub: Path) -> None:
    model = find_model("some-org/A.model_1")
    assert (model.name, model.layers) == ("some-org/A.model_1", 3)
    (hub / "models--some-org--A.model_1" / "refs" / "main").unlink()
    assert cached_config("some-org/A.model_1") is not None


def test_an_experiment_may_name_one_wherever_it_lies(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    file = tmp_path / "inner" / "e.yaml"
    file.write_text("model: some-org/A.model_1\ncluster: dgx-h100\n")
    assert load_experiment(file, {}).model_spec().layers == 3
    text = file.read_text() + "sweep: {grid: {model.layers: [2, 4]}}\n"
    file.write_text(text)
    points = load_study(file).points
    assert [point.experiment.model_spec().layers for point in points] == [2, 4]


def test_a_file_of_that_name_wins(hub: Path, tmp_path: Path) -> None:
    folder = tmp_path / "some-org" / "A.model_1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"n_layer": 7}))
    assert find_model("some-org/A.model_1").layers == 7


def test_what_is_not_there_is_told_with_the_way_to_get_it(hub: Path) -> None:
    with pytest.raises(InputError) as caught:
        find_model("some-org/other")
    assert tells(str(caught.value), str(hub), "hf download some-org/other config.json")


def test_a_file_that_is_not_there_is_no_id(hub: Path) -> None:
    with pytest.raises(InputError) as caught:
        find_model("nowhere/config.json")
    assert "no such file; check the path" in str(caught.value)
    assert "hf download" not in str(caught.value)


@pytest.mark.parametrize("text", ["a", "/a/b", "a/b/c", "../b", "a/..", "a/b.c ", "~/a", "-a/b"])
def test_what_is_no_id(text: str, hub: Path) -> None:
    assert not is_id(text)
    assert cached_config(text) is None


@pytest.mark.parametrize(
    ("variable", "value", "folder"),
    [
        ("HUGGINGFACE_HUB_CACHE", "o", "o"),
        ("HF_HOME", "h", "h/hub"),
        ("XDG_CACHE_HOME", "c", "c/huggingface/hub"),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(
    variable: str, value: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bigplan.spec.hf.cache import hub_folder

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert hub_folder() == Path(folder)
