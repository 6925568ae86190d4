"""A launch as a job of Ray's job server, as docs/launching-manifests.md says."""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from bigplan.launcher.record import read_record
from bigplan.launcher.session import IDLE_WORKERS, ONE_MACHINE
from bigplan.plan import save_plan
from bigplan.spec.detect.machine import cache_folder
from tests.launcher.soak import COMMAND
from tests.tiny import tiny_plan

pytest.importorskip("ray")
SECONDS = 100.0


@dataclass(frozen=True)
class Head:
    """A Ray that takes jobs from who has its token."""

    url: str
    environment: dict[str, str]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    gcs, dashboard, agent = free_ports(3)
    paths = os.pathsep.join(filter(None, sys.path))
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = ours | {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(cache_folder().parent),  # the job need not compile the runtime's C++
        "PYTHONPATH": paths,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        ONE_MACHINE: "0",
        IDLE_WORKERS: "0",
    }
    short = Path("/tmp") / f"bigplan-test-{os.getpid()}"  # paths of sockets are short
    words = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={gcs}"]
    words += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    words += ["--num-cpus=2", f"--temp-dir={short}", "--object-store-memory=100000000"]
    log = (tmp_path / "head.txt").open("w")
    process = subprocess.Popen(
        ray(*words), env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        yield Head(f"http://127.0.0.1:{dashboard}", environment)
    finally:
        process.terminate()
        process.wait(30)
        subprocess.run(["rm", "-r", "-f", str(short)], check=True)


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in found]


def ray(*words: str) -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", *words]


def answered(head: Head, token: str) -> int:
    """The status with which the server answers who has this token."""
    asked = Request(f"{head.url}/api/jobs/", headers={"Authorization": f"Bearer {token}"})
    try:
        with urlopen(asked, timeout=SECONDS) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def submitted(head: Head, *job: str) -> subprocess.CompletedProcess[str]:
    """The job's output, once it has ended; the server may still be starting."""
    wait = ["--address", head.url, "--log-style=record", "--"]
    return subprocess.run(
        ray("job", "submit", *wait, *job),
        env=head.environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_a_plan_is_launched_by_the_job_server(head: Head, tmp_path: Path) -> None:
    save_plan(tiny_plan(1), tmp_path / "plan.yaml")
    wait_until_it_takes_jobs(head)
    token = head.environment["RAY_AUTH_TOKEN"]
    assert [answered(head, each) for each in (token, secrets.token_hex(32))] == [200, 403]
    launch = ["launch", str(tmp_path / "plan.yaml"), "--address", "auto", "--steps", "2"]
    done = submitted(
        head, sys.executable, "-c", COMMAND, *launch, "--run-dir", str(tmp_path / "runs")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rank on the Ray cluster at auto" in done.stdout
    record = read_record(tmp_path / "runs" / "tiny-llama-test-1")
    assert (record.summary.status, record.summary.steps) == ("finished", 2)


def wait_until_it_takes_jobs(head: Head) -> None:
    host, _, port = head.url.removeprefix("http://").partition(":")
    limit = time.monotonic() + SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except OSError:
            assert time.monotonic() < limit
            time.sleep(0.1)
        else:
            return
