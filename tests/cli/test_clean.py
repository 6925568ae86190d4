"""`bigplan clean` where a launch has taken up a run that an earlier one was killed in."""

import json
import os
import socket
from pathlib import Path

import pytest

from bigplan.launcher.leftovers import ListedLaunch
from bigplan.launcher.lock import only_launch
from tests.cli.conftest import Run
from tests.wording import tells


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Runs of three launches that were killed and left scratch, in the order of the list."""
    state, runs = tmp_path / "state", [tmp_path / name for name in ("one", "two", "three")]
    listed = state / "bigplan" / "launches"
    listed.mkdir(parents=True)
    for number, run in enumerate(runs):
        (run / "scratch").mkdir(parents=True)
        entry = ListedLaunch(host=socket.gethostname(), run=str(run), scratch=str(run / "scratch"))
        (listed / f"{number}.json").write_text(entry.model_dump_json())
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    return runs


def test_a_run_in_use_keeps_its_scratch_and_the_others_are_cleaned(
    bigplan: Run, killed: list[Path]
) -> None:
    first = killed[0]
    with only_launch(first):  # by a launch on another machine: on this one's list it is not
        code, out, _ = bigplan("clean")
        assert code == 2
        assert tells(out, "scratch stays", str(first), "in use by a launch")
        assert out.count("stays") == 1
        assert [(run / "scratch").exists() for run in killed] == [True, False, False]
        code, out, _ = bigplan("clean", "--json")
        (left,) = json.loads(out)["leftovers"]
        assert code == 2
        assert left["run"] == str(first)
        assert "in use by a launch" in left["kept"]
    assert bigplan("clean")[0] == 0
    assert not (first / "scratch").exists()
    assert first.is_dir()


def test_tests_have_a_list_of_their_own(tmp_path: Path) -> None:
    assert Path(os.environ["XDG_STATE_HOME"]).parent == tmp_path.parent
