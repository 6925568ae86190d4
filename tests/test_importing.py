import os
import subprocess
import sys
from pathlib import Path

import pytest

from bigplan.importing import environment


def test_a_block_sees_what_the_user_did_not_set_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BIGPLAN_SET", "mine")
    monkeypatch.delenv("BIGPLAN_UNSET", raising=False)
    with environment(BIGPLAN_SET="other", BIGPLAN_UNSET="new"):
        assert os.environ["BIGPLAN_SET"] == "mine"
        assert os.environ["BIGPLAN_UNSET"] == "new"
    assert os.environ["BIGPLAN_SET"] == "mine"
    assert "BIGPLAN_UNSET" not in os.environ


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_the_solver_starts_no_threads() -> None:
    code = "import os, bigplan.solve.ilp; print(len(os.listdir('/proc/self/task')))"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert int(told.stdout) == 1
