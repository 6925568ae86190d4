"""A Ray to run in: a local one for the length of a launch, or a cluster that is already there.

A local Ray listens on loopback alone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from bigplan.errors import InputError, RefusedError, WorkerError
from bigplan.installed import LAUNCH, missing
from bigplan.launcher.head import RayHead, require_cluster
from bigplan.launcher.leftovers import end_processes

OBJECT_STORE = 128 << 20  # bytes: plans and timelines only, no tensors
LOOPBACK = "127.0.0.1"

# The share of a node's memory above which Ray kills workers. Ray's default is 0.95, and a plan that
# fills a machine's free memory takes 0.94 of it (an H200's machine: 118.7 of 125.9 GiB).
KILLING = "0.98"

# Whether Ray starts a worker for every core at once. A rank has variables of its own, so Ray starts
# another process for it, and those would idle until the end.
IDLE_WORKERS = "RAY_prestart_worker_first_driver"

OWN_TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # where users set theirs

# Ray replaces a loopback address by the machine's outward address. Then it listens on all
# interfaces, and for Prometheus without a token. It does not if it is told that this machine is in
# no cluster.
ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def require_packages() -> None:
    """Raises RefusedError that names the extra to install where a launch's packages are missing."""
    if why := missing(LAUNCH, "launch"):
        raise RefusedError(f"nothing can be launched here: {why}")


@dataclass
class Session:
    """A Ray that runs."""

    address: str | None
    cpus: int
    cuda: bool
    head: RayHead

    def renew(self) -> None:
        """Start a local Ray again where it has lost a process; wait for a cluster's head.

        Raises WorkerError.
        """
        if self.address is not None:
            self.head.wait()
        elif self.head.dead():
            _stop(self)
            _start(self)

    @property
    def folder(self) -> Path | None:
        """Where a local Ray keeps its logs, which its processes have open."""
        import ray

        node = ray._private.worker._global_node
        local = self.address is None and node is not None
        return Path(node.get_session_dir_path()) if local else None


@contextmanager
def ray_session(address: str | None, cpus: int, cuda: bool) -> Iterator[Session]:
    """Ray for the length of the block; a local one is stopped afterwards, whatever happens.

    Raises InputError where no cluster answers at `address`, WorkerError where no local Ray starts.
    """
    session = Session(address, cpus, cuda, RayHead(address))
    with _quiet(), _without_signals(), _variables(_of_local() if address is None else {}):
        try:
            _start(session)
            yield session
        finally:
            _stop(session)


def _stop(session: Session) -> None:
    """Leave Ray; end a local one, also where it was still starting.

    ray.shutdown() gives the raylet a second and kills it then. The raylet's agents, which it would
    have ended, live on for a minute.
    """
    import ray

    ray.shutdown()
    if session.address is None:
        temporary = Path(ray._common.utils.get_default_ray_temp_dir())
        for folder in temporary.glob(f"session_*_{os.getpid()}"):
            end_processes(str(folder))


def _start(session: Session) -> None:
    import ray

    _keep_token(new=session.address is None)
    try:
        if session.address is None:
            _start_local(session.cpus, session.cuda)
            session.head = RayHead(None)
        else:
            require_cluster(session.address)
            ray.init(address=session.address, log_to_driver=False, logging_level="ERROR")
            session.head = RayHead(ray.get_runtime_context().gcs_address)  # of `auto`, too
    except InputError:
        raise
    except Exception as error:  # Ray raises plain ones where a process does not start in time
        raise _unreachable(session.address, error) from error


def _start_local(cpus: int, cuda: bool) -> None:
    import ray

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


def _of_local() -> Mapping[str, str]:
    """Ray's own defaults stay, token authentication among them, but for these."""
    usual = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_usage_threshold": KILLING,
        IDLE_WORKERS: "0",
    }
    return {ONE_MACHINE: "0"} | {k: v for k, v in usual.items() if k not in os.environ}


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that Ray's processes inherit, and that Ray read here when it was imported."""
    import ray

    before = {name: os.environ.get(name) for name in values}
    clusters = ray._private.ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(values)
    if ONE_MACHINE in values:
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = clusters
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the lines that Ray prints for its raylet; the run itself reports what matters."""
    import ray

    before = ray._private.worker._worker_logs_enabled
    ray._private.worker._worker_logs_enabled = False
    try:
        yield
    finally:
        ray._private.worker._worker_logs_enabled = before


@contextmanager
def _without_signals() -> Iterator[None]:
    """Keep Ray from taking signals of this process, which the launch catches itself.

    Ray's Python replaces the handler of SIGTERM. Ray's C++ comes before whatever handler there is,
    prints its stack and aborts the process if it has not ended within 3 s of a SIGTERM; stopping
    Ray takes longer than that on a busy machine. Workers and daemons stay as they are.
    """
    import ray

    private: Any = ray._private
    before = (
        private.ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER,
        private.utils.set_sigterm_handler,
    )
    private.ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    private.utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        (
            private.ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER,
            private.utils.set_sigterm_handler,
        ) = before


def _keep_token(*, new: bool) -> None:
    """Keep others from reading the token, which lets its holder run code in this user's Ray.

    Ray writes the file by the umask, on most machines readable for everybody. `new`: make a token
    if there is none.
    """
    path = Path.home() / ".ray" / "auth_token"
    try:
        if path.exists():
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                path.chmod(0o600)
        elif new and not any(name in os.environ for name in OWN_TOKEN):
            _write_token(path)
    except OSError:
        return  # another's, a home without space, or another launch was first: Ray says what it is


def _write_token(path: Path) -> None:
    """Whole or not at all. Raises OSError, also where one is there by now."""
    from ray._private.authentication import authentication_token_generator as generator

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent) as file:  # which only its owner may read
        file.write(generator.generate_new_authentication_token())
        file.flush()
        os.link(file.name, path)


def _remedy(reason: str) -> str:
    if "AF_UNIX" in reason:
        return "set RAY_TMPDIR to a shorter path, such as /tmp"
    if "timed out" in reason:  # Ray gives its raylet 30 s
        return "launch again when other programs leave the machine more of its cores and memory"
    return "`bigplan doctor` looks at memory, ports and other Rays of this machine"


def _unreachable(address: str | None, error: Exception) -> InputError | WorkerError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if address is None:
        what = reason.rstrip(".")
        return WorkerError(f"no local Ray could be started: {what}; {_remedy(reason)}")
    return InputError(
        f"no Ray cluster can be used at {address}: {reason}. Check the address, that "
        "`ray status` works there, and that both sides have RAY_AUTH_MODE=token and the same "
        "RAY_AUTH_TOKEN"
    )
