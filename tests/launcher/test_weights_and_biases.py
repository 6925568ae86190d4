"""What Weights & Biases' library is told; a module in its place writes that down.

With the real one (0.31, WANDB_MODE=offline) a launch was tried by hand: it is 100 MB installed.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bigplan.errors import RefusedError
from bigplan.launcher import weights_and_biases
from bigplan.launcher.driver import LaunchOptions, launch
from bigplan.launcher.record import read_record
from bigplan.launcher.resume import read_resumable
from tests.launcher.fakes import Fake, quiet, told, without_ray
from tests.tiny import tiny_plan

__all__ = ["without_ray"]
pytestmark = pytest.mark.usefixtures("without_ray")


class Library(ModuleType):
    """`wandb`, as far as it is used."""

    class Error(Exception):
        """Its errors' base."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.ended = 0
        self.fails = ""

    def Settings(self, **settings: object) -> dict[str, object]:
        return settings

    def init(self, **how: Any) -> "Library":
        if self.fails == "init":
            raise self.Error("api_key not configured (no-tty)\nmore")
        self.begun.append(how)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, float]) -> None:
        if self.fails == "log" and values["step"] == 2:
            raise OSError(28, "No space left on device")
        self.logged.append(values)

    def finish(self) -> None:
        self.ended += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setattr(weights_and_biases, "find_spec", lambda name: name)
    return library


def test_every_step_is_told_and_a_resumed_run_is_the_same(wandb: Library, tmp_path: Path) -> None:
    folder = launch(tiny_plan(), told(tmp_path, steps=2, wandb="mine"), quiet(), Fake)
    run = read_resumable(folder)
    again = LaunchOptions(run.how.model_copy(update={"steps": 3}), run)
    launch(tiny_plan(), again, quiet(), Fake)
    assert [values["step"] for values in wandb.logged] == [1, 2, 3]
    assert [values["loss"] for values in wandb.logged] == [4.0, 3.0, 2.0]
    assert wandb.logged[0]["memory/host"] == 200.0
    first, second = wandb.begun
    assert first["id"] == second["id"]
    assert (first["project"], first["resume"], first["dir"]) == ("mine", "allow", str(folder))
    assert first["config"]["strategy"]["dp"] == 2
    assert wandb.ended == 2


@pytest.mark.parametrize(
    ("fails", "why"), [("init", "api_key not configured (no-tty)"), ("log", "No space left")]
)
def test_a_run_goes_on_without_it(wandb: Library, tmp_path: Path, fails: str, why: str) -> None:
    wandb.fails = fails
    record = read_record(launch(tiny_plan(), told(tmp_path, steps=3, wandb="mine"), quiet(), Fake))
    assert (record.summary.status, record.summary.steps) == ("finished", 3)
    assert any(
        note.startswith("Weights & Biases shows less than all: ") and why in note
        for note in record.summary.notes
    )


def test_where_it_is_not_installed_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_and_biases, "find_spec", lambda name: None)
    with pytest.raises(RefusedError, match=r"pip install 'bigplan\[wandb\]'"):
        launch(tiny_plan(), told(tmp_path, wandb="mine"), quiet(), Fake)
    assert not list(tmp_path.iterdir())
