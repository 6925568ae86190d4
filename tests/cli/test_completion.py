"""What shells ask the program for, as their scripts do."""

import os
import subprocess
from pathlib import Path

import pytest

from bigplan.cli.completion import known_clusters, known_models
from tests.cli.test_output import START


def completed(words: str, number: int, folder: Path) -> list[str]:
    asked = {"_BIGPLAN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    path = {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    done = subprocess.run(
        START,
        env={**os.environ, **path, **asked},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_commands_and_names(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").touch()
    assert completed("bigplan expl", 1, tmp_path) == ["explain"]
    assert completed("bigplan plan --model my", 3, tmp_path) == ["my.yaml"]
    assert completed("bigplan plan --cluster dgx-h", 3, tmp_path) == ["dgx-h100"]
    assert completed("bigplan clusters dgx-h", 2, tmp_path) == ["dgx-h100"]
    assert completed("bigplan plan --engine n", 3, tmp_path) == ["native", "nemo"]


def test_a_model_that_is_an_argument_is_offered(tmp_path: Path) -> None:
    assert completed("bigplan kernels explain gpt2", 3, tmp_path) == ["gpt2-xl"]


def test_names_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-mine").mkdir()
    for name in ("gpt2-mine/config.json", "gpt2.txt", ".gpt2.yaml", "gpt2-b.yml"):
        (tmp_path / name).touch()
    assert known_models("gpt2") == ["gpt2-xl", "gpt2-b.yml", "gpt2-mine/"]
    assert known_models("gpt2-mine/") == ["gpt2-mine/config.json"]
    assert known_models(f"{tmp_path}/gpt2-b") == [f"{tmp_path}/gpt2-b.yml"]
    assert known_models("nowhere/") == []
    assert "dgx-h100" in known_clusters("")
