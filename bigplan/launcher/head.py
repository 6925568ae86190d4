"""Ray's head: is what listens at an address one, does it still live, and what it says unasked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bigplan.errors import InputError, LostError, WorkerError

CONNECT_SECONDS = 10.0
EVERY = 5.0  # seconds between two questions to a cluster's head
GLANCE = 1.0  # seconds for an answer while ranks are waited for, as there are more questions
SURE = 5.0  # seconds for an answer where without it the head is left to itself
GONE = 40.0  # seconds without an answer; after 60 Ray ends whoever is connected, without a word
VITAL = ("gcs_server", "raylet")  # of a local Ray's processes: no work goes on without them


@dataclass
class RayHead:
    """The head of a cluster at `address`, or of this process's local Ray (None)."""

    address: str | None
    clock: Callable[[], float] = time.monotonic
    lost: bool = False
    _asked: float = field(init=False)
    _heard: float = field(init=False)

    def __post_init__(self) -> None:
        self._asked = self._heard = self.clock()

    def look(self) -> None:
        """Raise LostError where a local Ray has lost a process, WorkerError where a cluster has."""
        if self.address is None:
            dead = self.dead()
            if dead:
                self.lost = True
                raise LostError(f"Ray's {dead[0]} on this machine has ended")
            return
        now = self.clock()
        if now - self._asked < EVERY:
            return
        self._asked = now
        if self._answers(GLANCE):
            self._heard = now
        elif now - self._heard > GONE:
            self.lost = True
            raise WorkerError(
                f"the head of the Ray cluster at {self.address} has not answered for "
                f"{now - self._heard:.0f} s; start it again"
            )

    def alive(self) -> bool:
        """Whether Ray can be asked for anything: without its head that would never end.

        Of a busy head that is taken for a dead one the next ranks would find no room.
        """
        return not (self.lost or self.dead()) and self._answers(SURE)

    def wait(self, pause: Callable[[float], object] = time.sleep) -> None:
        """Return once a cluster's head answers. Raises WorkerError where it does not in time."""
        self._heard = self.clock()
        while not self.alive():
            pause(1.0)
            self.look()

    def _answers(self, seconds: float) -> bool:
        try:
            if self.address is not None:
                require_ray(self.address, seconds)
        except InputError:
            return False
        return True

    def dead(self) -> list[str]:
        """Names of a local Ray's vital processes that have ended."""
        import ray

        node = ray._private.worker._global_node
        if self.address is not None or node is None:
            return []
        running = {name: node.all_processes.get(name, []) for name in VITAL}
        return [
            name
            for name, processes in running.items()
            if any(each.process.poll() is not None for each in processes)
        ]


def require_ray(address: str, seconds: float = CONNECT_SECONDS) -> None:
    """Ask what listens at HOST:PORT whether it is a Ray, which takes this side's token.

    Ray itself would try for more than a minute, and then only say that it could not connect.
    Raises InputError. Other kinds of addresses are left to Ray.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in address or os.environ.get("RAY_USE_TLS") == "1":
        return
    import grpc
    from ray.core.generated.gcs_service_pb2 import CheckAliveRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = NodeInfoGcsServiceStub(channel).CheckAlive
        try:
            reply = ask(CheckAliveRequest(), timeout=seconds, metadata=_token())
        except grpc.RpcError as error:
            raise InputError(_refused(address, error)) from None
    _require_version(address, reply.ray_version)


def require_cluster(address: str) -> None:
    """`require_ray` of what a user names, and of the address that Ray makes of it.

    Ray looks for `auto`, and replaces a loopback host by this machine's outward address. A head
    that listens on loopback alone, or behind an SSH tunnel, is not there, and Ray asks for ever.
    Raises InputError; ValueError and ConnectionError are Ray's, where it can make nothing of it.
    """
    from ray._private.services import canonicalize_bootstrap_address

    require_ray(address)
    if "://" in address:
        return
    used = canonicalize_bootstrap_address(address) or address
    if used == address:
        return
    try:
        require_ray(used)
    except InputError as error:
        raise InputError(
            f"Ray makes {used} of {address}, and {error}. Name the head as other machines reach "
            "it: Ray takes no tunnel, and no head that listens on loopback alone"
        ) from None


def _token() -> tuple[tuple[str, str], ...]:
    """The token by which this process identifies itself; empty unless RAY_AUTH_MODE=token."""
    from ray import _raylet

    loader: Any = _raylet
    return tuple(loader.AuthenticationTokenLoader.instance().get_token_for_http_header().items())


def _refused(address: str, error: Any) -> str:
    import grpc

    code = error.code()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        if os.environ.get("RAY_AUTH_MODE") != "token":
            return (
                f"the Ray cluster at {address} wants a token, and this side sends none: set "
                "RAY_AUTH_MODE=token, with the cluster's token in RAY_AUTH_TOKEN or in "
                "~/.ray/auth_token"
            )
        return (
            f"the Ray cluster at {address} has another token than this side: set RAY_AUTH_TOKEN "
            "to the cluster's (`ray get-auth-token` there prints it)"
        )
    if code is grpc.StatusCode.UNAVAILABLE and "refused" in error.details():
        return f"nothing listens at {address}; check the address, and that Ray runs there"
    return (
        f"what listens at {address} is no Ray head ({code.name.lower()}); name the address that "
        "`ray start --head` prints, whose port is 6379 by default"
    )


def _require_version(address: str, theirs: str) -> None:
    import ray

    if theirs and theirs != ray.__version__:
        raise InputError(
            f"the Ray cluster at {address} has Ray {theirs}, and here is {ray.__version__}: both "
            "need the same; install that one"
        )
