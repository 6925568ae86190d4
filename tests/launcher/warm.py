"""Ray workers that have torch imported when they start: they fork from one server.

To import Ray twice, torch and the package takes a worker 4 s of a core, and the tests of launches
start about a hundred. Their Rays have no dashboard, either.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.launcher import agent, warm_worker

# Ray joins the name to a folder of its own, which an absolute path replaces.
CONSTANTS, NAME = "ray._private.ray_constants", "SETUP_WORKER_FILENAME"
# What another process runs before it starts a Ray whose workers are to be there.
BEFORE = (
    f"import {CONSTANTS} as constants; constants.{NAME} = {warm_worker.__file__!r}; "
    "import pytest; from tests.launcher.warm import without_dashboard; "
    "without_dashboard(pytest.MonkeyPatch()); "
)


def without_dashboard(patch: pytest.MonkeyPatch) -> None:
    """Rays that this process starts have no dashboard, and agents of it that do nothing.

    Launches use neither. An agent takes 4.5 s of a core to start, and each node has one.
    """
    from ray._private import ray_constants, services

    usual = services._build_python_executable_command_memory_profileable

    def command(component: str, *how: object, **more: object) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-I", "-S", agent.__file__]
        return list(usual(component, *how, **more))

    patch.setattr(services, usual.__name__, command)
    # What it returns where the dashboard cannot start, which Ray takes.
    patch.setattr(services, "start_api_server", lambda *_, **__: (None, None))


@contextmanager
def warm_server() -> Iterator[Path]:
    """A server for the length of the block: where it listens."""
    with TemporaryDirectory(prefix="warm-") as folder:
        path = Path(folder) / "socket"
        server = subprocess.Popen(
            [sys.executable, warm_worker.__file__, "serve", str(path)],
            stdin=subprocess.PIPE,  # whose end is the server's
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listening\n"
            yield path
        finally:
            server.communicate()


@contextmanager
def warm_workers(server: Path) -> Iterator[None]:
    """For the length of the block nodes of Ray that this process starts have their workers there.

    Nodes find the server by the environment that they are started in.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(warm_worker.SOCKET, str(server))
        patch.setattr(f"{CONSTANTS}.{NAME}", warm_worker.__file__)
        yield


def forked(raylet: int) -> list[int]:
    """The workers that a raylet has had from the server so far."""
    found = Path(os.environ.get(warm_worker.SOCKET, os.devnull)).parent.glob(f"worker-{raylet}-*")
    return [int(mark.name.rpartition("-")[2]) for mark in found]
