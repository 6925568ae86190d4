import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bigplan.errors import RefusedError
from bigplan.launcher import lock
from bigplan.launcher.lock import only_launch, rank_lock, wait_for_workers

WORKER = """
import sys, time
from pathlib import Path
from bigplan.launcher.lock import hold
held = hold(Path(sys.argv[1]))
print("holds", flush=True)
time.sleep(100)
"""


def test_one_launch_at_a_time(tmp_path: Path) -> None:
    with (
        only_launch(tmp_path),
        pytest.raises(RefusedError, match="still running"),
        only_launch(tmp_path),
    ):
        pass
    with only_launch(tmp_path):
        pass


def test_who_looks_keeps_no_launch_away(tmp_path: Path) -> None:
    looked = (tmp_path / lock.LAUNCH).open("a")
    fcntl.flock(looked, fcntl.LOCK_SH)
    looks = threading.Timer(0.05, looked.close)
    looks.start()
    with only_launch(tmp_path):
        assert looked.closed
    looks.join()


def test_a_worker_is_waited_for_until_its_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", WORKER, str(rank_lock(tmp_path, 0))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "holds\n"
            monkeypatch.setattr(lock, "PATIENCE", 0.2)
            with pytest.raises(RefusedError, match="worker of an earlier launch still runs"):
                wait_for_workers(tmp_path)
        finally:
            worker.kill()
        monkeypatch.setattr(lock, "PATIENCE", 60.0)
        wait_for_workers(tmp_path)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(RefusedError, match="cannot be written to"), only_launch(tmp_path):
        pass
