"""`--json` of the commands that print: one object on stdout that begins with its format."""

import json
from pathlib import Path
from typing import Any

import pytest

from bigplan.cli.app import app
from bigplan.cli.as_json import FORMAT
from bigplan.plan import save_plan
from bigplan.spec.cluster import Cluster
from tests.cli.conftest import Run
from tests.data.texts import write_texts
from tests.tiny import tiny_plan

WITHOUT = {"schema"}
"""prints a JSON Schema and nothing else"""


def told(bigplan: Run, *arguments: object) -> dict[str, Any]:
    code, out, err = bigplan(*arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert next(iter(found.items())) == ("format", FORMAT)
    return found


def test_every_command_that_prints_has_it() -> None:
    from typer.main import get_command

    def commands(group: Any, before: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, one in group.commands.items():
            inner = hasattr(one, "commands")
            found |= commands(one, f"{name} ") if inner else {before + name: one}
        return found

    known = commands(get_command(app))
    without = {
        name
        for name, command in known.items()
        if not any("--json" in parameter.opts for parameter in command.params)
    }
    assert without == WITHOUT


def test_a_report(bigplan: Run, tmp_path: Path) -> None:
    plan = tiny_plan()
    save_plan(plan, tmp_path / "plan.yaml")
    found = told(bigplan, "report", "plan.yaml")
    assert found["step_seconds"] == plan.predicted.step_seconds
    assert found["strategy"]["dp"] == plan.strategy.dp
    cluster = told(bigplan, "report", "h200-1x")["cluster"]
    assert Cluster.model_validate(cluster).gpus == 1


def test_parts_of_a_benchmark(bigplan: Run) -> None:
    pytest.importorskip("torch")
    assert "norms" in told(bigplan, "kernels", "bench", "--list")["parts"]


def test_data(bigplan: Run, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", ["one", "two"])
    made = told(bigplan, "data", "prepare", "a.jsonl", "--out", "done")
    assert made["folders"]["done"]["documents"] == 2
    assert told(bigplan, "data", "check", "done") == made


def test_a_configuration(bigplan: Run, tmp_path: Path) -> None:
    save_plan(tiny_plan(), tmp_path / "plan.yaml")
    printed = told(bigplan, "config", "plan.yaml", "--for", "fsdp2")
    assert printed["files"]
    assert told(bigplan, "config", "plan.yaml", "--for", "fsdp2", "--to", "new") == printed
    for name, text in printed["files"].items():
        assert (tmp_path / "new" / name).read_text() == text


def test_this_machine(bigplan: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bigplan.cli.describe.find_spec", lambda name: None)
    found = told(bigplan, "detect", "--cpu-devices", 1, "--out", "here.yaml")
    assert Cluster.model_validate(found["cluster"]).gpus == 1
    assert (tmp_path / "here.yaml").exists()


def test_nothing_to_clean(bigplan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigplan.launcher.leftovers.leftovers", lambda: ())
    assert told(bigplan, "clean", "--dry-run") == {
        "format": FORMAT,
        "removed": False,
        "leftovers": [],
    }
