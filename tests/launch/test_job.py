"""A launch as a job of Ray's job server, as docs/launching-manifests.md says."""

import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from bigplan.launcher.leftovers import end_processes
from bigplan.launcher.record import read_record
from bigplan.launcher.session import IDLE_WORKERS, ONE_MACHINE
from bigplan.plan import save_plan
from bigplan.spec.detect.machine import cache_folder
from tests.launcher.soak import COMMAND
from tests.tiny import tiny_plan

pytest.importorskip("ray")


@dataclass(frozen=True)
class Head:
    """A Ray that takes jobs from who has its token."""

    url: str
    environment: dict[str, str]
    process: subprocess.Popen[bytes]


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
    with (tmp_path / "head.txt").open("w") as log:
        process = subprocess.Popen(
            ray(*words), env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield Head(f"http://127.0.0.1:{dashboard}", environment, process)
        process.terminate()
        process.wait()
    finally:
        process.kill()
        process.wait()
        end_processes(str(short))
        shutil.rmtree(short, ignore_errors=True)


def free_ports(number: int) -> list[int]:
    """Ports that stay free until Ray has them.

    From 32,768 on the system gives ports to whoever asks for any, and up to 20,000 Ray to workers.
    """
    with ExitStack() as stack:
        found = set[int]()
        while len(found) < number:
            port = random.randrange(20_000, 32_768)
            with suppress(OSError):  # somebody has it
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.add(port)
        return list(found)


def ray(*words: str) -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", *words]


def answered(head: Head, token: str) -> int:
    """The status with which the server answers who has this token."""
    asked = Request(f"{head.url}/api/jobs/", headers={"Authorization": f"Bearer {token}"})
    try:
        with urlopen(asked) as answer:
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
    while head.process.poll() is None:
        try:
            socket.create_connection((host, int(port))).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("Ray's head has ended")
