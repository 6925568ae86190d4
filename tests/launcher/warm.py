"""Ray workers that have torch imported when they start: they fork from one server.

To import Ray twice, torch and the package takes a worker 4 s of a core, and the tests of nodes
start about seventy.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.launcher import warm_worker


@contextmanager
def warm_workers() -> Iterator[dict[str, str]]:
    """A server for the length of the block; options of Ray's nodes that have their workers there.

    Nodes find the server by the environment that they are started in.
    """
    with TemporaryDirectory(prefix="warm-") as folder, pytest.MonkeyPatch.context() as patch:
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
            patch.setenv(warm_worker.SOCKET, str(path))
            yield {"setup_worker_path": warm_worker.__file__}
        finally:
            server.communicate()


def forked(raylet: int) -> list[int]:
    """The workers that a raylet has had from the server so far."""
    found = Path(os.environ.get(warm_worker.SOCKET, os.devnull)).parent.glob(f"worker-{raylet}-*")
    return [int(mark.name.rpartition("-")[2]) for mark in found]
