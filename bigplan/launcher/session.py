"""A Ray to run in: a local one for the length of a launch, or a cluster that is already there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from bigplan.errors import InputError, RefusedError, WorkerError

OBJECT_STORE = 128 << 20  # bytes: plans and timelines only, no tensors
CONNECT_SECONDS = 10.0

# Ray replaces 127.0.0.1 by the machine's outward address; another loopback address it keeps.
LOOPBACK = "127.0.0.2"

# Of a node's memory, above which Ray kills workers. Its own is 0.95, and plans that fill what a
# machine has free take 0.94 of it (an H200's machine: 118.7 of 125.9 GiB).
KILLING = "0.98"


def require_packages() -> None:
    """Raises RefusedError that names the extra to install where Ray or torch is missing."""
    missing = [name for name in ("ray", "torch") if find_spec(name) is None]
    if missing:
        raise RefusedError(
            f"launching needs {' and '.join(missing)}, which is not installed; "
            "run: pip install 'bigplan[launch]'"
        )


@contextmanager
def ray_session(address: str | None, cpus: int, cuda: bool) -> Iterator[None]:
    """Ray for the length of the block; a local one is stopped afterwards, whatever happens.

    Raises InputError where no cluster answers at `address`, WorkerError where no local Ray starts.
    """
    import ray

    try:
        if address is None:
            _start_local(cpus, cuda)
        else:
            _require_answer(address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        ray.shutdown()
        raise _unreachable(address, error) from error
    try:
        yield
    finally:
        ray.shutdown()


def _start_local(cpus: int, cuda: bool) -> None:
    import ray

    # Ray's own defaults stay, token authentication among them; usage reports are not ours to send.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_memory_usage_threshold", KILLING)
    ray.init(
        address="local",
        num_cpus=max(cpus, os.cpu_count() or 1),
        num_gpus=None if cuda else 0,  # None: those that Ray finds
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=OBJECT_STORE,
        _node_ip_address=LOOPBACK,
    )


def _require_answer(address: str) -> None:
    """Raise OSError where nobody listens: Ray itself would try for more than a minute."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if host and port.isdecimal():  # not for "auto"
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def _unreachable(address: str | None, error: Exception) -> InputError | WorkerError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if address is None:
        return WorkerError(f"no local Ray could be started: {reason}")
    return InputError(
        f"no Ray cluster can be used at {address}: {reason}. Check the address, that "
        "`ray status` works there, and that both sides have the same RAY_AUTH_TOKEN"
    )
