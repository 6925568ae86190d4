"""Commands run in an empty folder, from outside."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bigplan.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bigplan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Run:
    """Run a command; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bigplan", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return int(exit_.value.code or 0), out, err

    return run
