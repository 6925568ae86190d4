"""`bigplan models`."""

import json
from pathlib import Path

import pytest

from bigplan.spec.catalog import find_model, list_clusters, list_models
from bigplan.spec.files.document import parse_document
from bigplan.spec.model import ModelSpec
from tests.cli.conftest import Run


def test_the_list_has_every_shipped_model_small_before_large(bigplan: Run) -> None:
    code, out, _ = bigplan("models")
    names = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert code == 0
    assert set(names) >= set(list_models())
    assert names.index("megatron-76b") < names.index("megatron-145b") < names.index("megatron-1t")
    (row,) = [line for line in out.splitlines() if line.split()[:1] == ["llama-3-8b"]]
    assert row.split() == ["llama-3-8b", "8.03", "B", "32", "4096", "14336", "32", "8192"]


def test_neither_names_nor_figures_are_cut_off_on_a_narrow_terminal(
    bigplan: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command, names in (("models", list_models()), ("clusters", list_clusters())):
        _, out, _ = bigplan(command)
        assert {line.split()[0] for line in out.splitlines() if line.strip()} >= set(names)
        assert "…" not in out


def test_the_list_as_json(bigplan: Run) -> None:
    rows = json.loads(bigplan("models", "--json")[1])
    assert {row["name"]: row["parameters"] for row in rows["models"]} == {
        name: find_model(name).parameter_count for name in list_models()
    }


def test_one_model_is_a_document_to_copy(bigplan: Run) -> None:
    code, out, _ = bigplan("models", "opt-13b")
    assert code == 0
    assert out.startswith("# 12,853,473,280 parameters: embedding 267,888,640, block 40 x ")
    assert parse_document(out, ModelSpec) == find_model("opt-13b")


def test_one_model_as_json(bigplan: Run) -> None:
    shown = json.loads(bigplan("models", "mistral-7b", "--json")[1])
    assert (shown["parameters"], shown["sliding_window"]) == (7241732096, 4096)
    kinds = shown["parameters_of_kind"]
    assert kinds["embedding"] + 32 * kinds["block"] + kinds["head"] == shown["parameters"]


def test_a_file_is_shown_as_well(bigplan: Run, tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4}
    config |= {"vocab_size": 300, "n_positions": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "source: Hugging Face config.json (gpt2)" in bigplan("models", tmp_path)[1]


def test_an_unknown_model(bigplan: Run) -> None:
    code, out, err = bigplan("models", "opt-13c")
    assert (code, out) == (2, "")
    assert "no model is called 'opt-13c'; did you mean 'opt-13b'?" in err
