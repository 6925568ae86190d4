"""What launches leave that were killed, and who may remove it."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bigplan.errors import RefusedError
from bigplan.launcher.actor import Folders, RankActor
from bigplan.launcher.driver import launch
from bigplan.launcher.leftovers import Leftover, ListedLaunch, clean, leftovers, listed
from bigplan.launcher.lock import only_launch
from tests.launcher.fakes import Fake, quiet, told, without_ray
from tests.tiny import tiny_plan

__all__ = ["without_ray"]

HOLDS = """
import sys, time
from pathlib import Path
from bigplan.launcher.leftovers import listed
run, session = map(Path, sys.argv[1:])
with listed(run, run / "scratch") as launch:
    launch.ray(session)
    print("listed", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "bigplan" / "launches"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with scratch."""
    scratch = tmp_path / "run" / "scratch" / "rank-0"
    scratch.mkdir(parents=True)
    (scratch / "offloaded.bin").write_bytes(bytes(1000))
    return tmp_path / "run"


@contextmanager
def launched(run: Path, session: Path) -> Iterator[subprocess.Popen[str]]:
    """A launch that lasts."""
    paths = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(run), str(session)],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "listed\n"
        yield process
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@contextmanager
def agent(session: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a log of a Ray open, as that Ray's do."""
    session.mkdir()
    with (session / "agent.log").open("w") as log:
        process = subprocess.Popen(["sleep", "600"], stdout=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def reader(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Somebody who looks at a log of a Ray."""
    with log.open() as file:
        process = subprocess.Popen(["sleep", "600"], stdin=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_what_a_killed_launch_left_is_named_and_removed(run: Path, tmp_path: Path) -> None:
    session = tmp_path / "session"
    with agent(session) as left_behind, reader(session / "agent.log") as reads:
        with launched(run, session) as process:
            assert not leftovers()  # it runs
            process.kill()
            process.wait()
        (left,) = leftovers()
        assert left.entry.run == str(run)
        assert left.processes == (left_behind.pid,)
        assert 1000 <= left.scratch < 1100
        assert str(run / "scratch") in str(left)
        assert "1 process of its Ray" in str(left)
        clean(left)
        assert left_behind.wait(100) == -9
        assert reads.poll() is None
    assert run.is_dir()
    assert not (run / "scratch").exists()
    assert not leftovers()


def test_scratch_of_a_run_that_goes_on_is_its_own(run: Path, state: Path) -> None:
    with launched(run, run / "none") as process:
        process.kill()
        process.wait()
    (left,) = leftovers()
    with only_launch(run), pytest.raises(RefusedError, match="in use by a launch"):
        clean(left)
    with listed(run, run / "scratch"):
        assert not leftovers()
        clean(replace(left, scratch=0))  # as found where processes of its Ray are left
    assert (run / "scratch").exists()
    assert not list(state.iterdir())  # nothing is left that a list would help to find


def test_other_machines_and_broken_entries_are_let_alone(run: Path, state: Path) -> None:
    state.mkdir(parents=True)
    other = ListedLaunch(host="elsewhere", run=str(run), scratch=str(run / "scratch"))
    (state / "other.json").write_text(other.model_dump_json())
    (state / "cut.json").write_text('{"host": "he')
    assert not leftovers()
    assert len(list(state.iterdir())) == 2


def test_a_home_that_cannot_be_written_is_no_reason_to_fail(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with listed(run, run / "scratch") as launch:
        launch.ray(None)
    assert not leftovers()


@pytest.mark.usefixtures("without_ray")
def test_a_launch_is_on_the_list_as_long_as_it_runs(tmp_path: Path, state: Path) -> None:
    seen = list[str]()

    class Looks(Fake):
        def preflight(self) -> None:
            seen.extend(path.read_text() for path in state.glob("*.json"))

    folder = launch(tiny_plan(1), told(tmp_path / "runs"), quiet(), Looks)
    (text,) = seen
    entry = ListedLaunch.model_validate_json(text)
    assert (entry.run, entry.scratch) == (str(folder), str(folder / "scratch"))
    assert not list(state.iterdir())


def test_an_empty_scratch_folder_is_something() -> None:
    left = Leftover(Path(), ListedLaunch(host="h", run="r", scratch="s"), 1, ())
    assert "1 B of scratch in s" in str(left)


def test_two_that_name_one_scratch_are_told_once(run: Path) -> None:
    for _ in range(2):
        with launched(run, run / "none") as process:
            process.kill()
            process.wait()
    assert len(leftovers()) == 1


def test_two_that_look_at_once_both_see_it(run: Path, state: Path) -> None:
    """As the ranks of one node do."""
    with launched(run, run / "none") as process:
        process.kill()
        process.wait()
    (path,) = state.iterdir()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert len(leftovers()) == 1


def test_a_rank_is_on_the_list_of_a_machine_that_the_launch_is_not_on(
    run: Path, state: Path
) -> None:
    folders = Folders(run, run / "scratch")
    ranks = [RankActor(tiny_plan(), rank, folders, Fake) for rank in range(2)]
    for rank in ranks:
        rank.preflight()
    (entry,) = state.glob("*.json")  # one for all of the machine
    assert ListedLaunch.model_validate_json(entry.read_text()).scratch == str(run / "scratch")
    for rank in ranks:
        rank.close()
    assert not list(state.iterdir())
    assert not (run / "scratch").exists()
    with listed(run, run / "scratch"):
        RankActor(tiny_plan(), 2, folders, Fake).preflight()  # as on the launch's own machine
        assert len(list(state.iterdir())) == 1
