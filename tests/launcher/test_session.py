"""The local Ray of a launch: where it listens, what becomes of it, and its token."""

import os
import signal
import stat
from functools import partial
from pathlib import Path

import pytest

from bigplan.errors import PreflightError, WorkerError
from bigplan.launcher import session
from bigplan.launcher.driver import launch
from bigplan.launcher.head import RayHead
from bigplan.launcher.leftovers import _writing_to
from bigplan.launcher.record import read_metrics, read_record
from bigplan.launcher.session import ONE_MACHINE, ray_session
from tests.launcher import fakes
from tests.launcher.fakes import Fake, plan_with, quiet, told
from tests.launcher.warm import without_dashboard
from tests.listening import listening

ray = pytest.importorskip("ray")


def test_a_local_ray_listens_on_loopback_alone_and_a_lost_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_whole: None
) -> None:
    """Ray itself ends the driver, with exit code 1, when its GCS has been gone for 60 s."""
    ray.cloudpickle.register_pickle_by_value(fakes)
    found, killed, look = set[str](), list[int](), RayHead.look

    def looking(head: RayHead) -> None:
        run = tmp_path / "tiny-llama-test-1"
        if not killed and len(read_metrics(run)) > 1:
            found.update(address for pid in _family(os.getpid()) for address, _ in listening(pid))
            processes = ray._private.worker._global_node.all_processes
            killed.append(processes["gcs_server"][0].process.pid)
            os.kill(killed[0], signal.SIGKILL)
            os.waitid(os.P_PID, killed[0], os.WEXITED | os.WNOWAIT)
            without_dashboard(monkeypatch)  # the next Ray's, which nobody looks at
        look(head)

    monkeypatch.setattr(RayHead, "look", looking)
    plan = plan_with(clip_norm=None)
    record = read_record(launch(plan, told(tmp_path, steps=4, checkpoint_every=1), quiet(), Fake))
    assert found
    assert found <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert [metric.loss for metric in record.metrics] == [4.0, 3.0, 2.0, 1.0]
    (lost,) = record.summary.restarts
    assert "gcs_server on this machine has ended" in lost.reason
    assert record.summary.status == "finished"
    assert ONE_MACHINE not in os.environ


def test_no_process_outlasts_a_ray_whose_raylet_takes_its_time(
    warm_whole: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray kills a raylet after a second, and the raylet's agents would stay for a minute.

    Nor does Ray outlast a launch that is refused.
    """
    folder = ""

    def refused() -> None:
        nonlocal folder
        with ray_session(None, 1, cuda=False) as started:
            folder = str(started.folder)
            node = ray._private.worker._global_node
            at_once = partial(node.kill_all_processes, check_alive=False, allow_graceful=False)
            monkeypatch.setattr(node, "kill_all_processes", lambda **_: at_once())
            raylet = node.all_processes["raylet"][0].process.pid
            assert set(_writing_to(folder)) > {raylet}
            raise PreflightError("there is less host memory than the plan promises")

    with pytest.raises(PreflightError):
        refused()
    assert not ray.is_initialized()
    assert not list(_writing_to(folder))


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("The current node timed out during startup.", "startup; launch again when"),
        ("AF_UNIX path length cannot exceed 107 bytes", "bytes; set RAY_TMPDIR"),
        ("No space left on device", "device; `bigplan doctor`"),
    ],
)
def test_a_ray_that_cannot_start_is_told(
    monkeypatch: pytest.MonkeyPatch, reason: str, remedy: str
) -> None:
    def fails(*_: object) -> None:
        raise Exception(reason)

    monkeypatch.setattr(session, "_start_local", fails)
    with pytest.raises(WorkerError, match=f"no local Ray could be started: .*{remedy}"):
        session.ray_session(None, 1, cuda=False).__enter__()


def test_lines_of_rays_own_processes_are_not_the_users(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"lines": ["a worker was killed"], "pid": "raylet", "is_err": False, "ip": "127.0.0.1"}
    monkeypatch.setattr(session, "_start", lambda session: None)
    tell = ray._private.worker.print_to_stdstream
    with ray_session(None, 1, cuda=False):
        tell(said, ignore_prefix=False)
    assert not capsys.readouterr().out
    tell(said | {"lines": ["another"]}, ignore_prefix=False)
    out = capsys.readouterr().out
    assert "raylet" in out
    assert "another" in out


def test_a_token_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in session.OWN_TOKEN:
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / ".ray" / "auth_token"
    session._keep_token(new=True)
    token = path.read_text()
    assert len(token) == 64
    path.chmod(0o644)  # as Ray writes it
    session._keep_token(new=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == token
    assert [each.name for each in path.parent.iterdir()] == ["auth_token"]


def test_a_token_in_the_environment_is_kept_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    session._keep_token(new=False)  # a cluster has its own
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    session._keep_token(new=True)
    assert not list(tmp_path.iterdir())


def _family(process: int) -> set[int]:
    """The process, its children and theirs."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stats = (folder / "stat").read_text()
        except OSError:
            continue
        parents[int(folder.name)] = int(stats.rpartition(")")[2].split()[1])
    family = {process}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family
