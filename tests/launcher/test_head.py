"""What is asked of Ray's head, without a Ray."""

import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from bigplan.errors import InputError, WorkerError
from bigplan.launcher import head
from bigplan.launcher.head import EVERY, GONE, RayHead, require_cluster, require_ray

pytest.importorskip("ray")


@pytest.fixture
def web_server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_listener_that_says_nothing_is_no_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(InputError, match=rf"{address} is no Ray head .*`ray start --head`"):
            require_ray(address, 0.3)


def test_a_web_server_is_no_ray(web_server: str) -> None:
    with pytest.raises(InputError, match="is no Ray head"):
        require_ray(web_server)


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match=f"nothing listens at {address}"):
            require_ray(address)


@pytest.mark.parametrize("address", ["auto", "ray://somewhere:10001", "somewhere"])
def test_other_kinds_of_addresses_are_rays_to_judge(address: str) -> None:
    require_ray(address)


def test_the_address_that_ray_makes_of_it_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head behind a tunnel: Ray itself would ask this machine's outward address, and for ever."""
    asked = []

    def ask(address: str) -> None:
        asked.append(address)
        if address == "127.0.0.9:6379":
            raise InputError("nothing listens at 127.0.0.9:6379")

    monkeypatch.setattr(head, "require_ray", ask)
    monkeypatch.setattr("ray._private.services.get_node_ip_address", lambda: "127.0.0.9")
    with pytest.raises(InputError, match=r"Ray makes 127\.0\.0\.9:6379 of localhost:6379"):
        require_cluster("localhost:6379")
    asked.clear()
    for address in ("10.0.0.1:6379", "ray://somewhere:10001"):
        require_cluster(address)
    assert asked == ["10.0.0.1:6379", "ray://somewhere:10001"]
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.9:6379")
    with pytest.raises(InputError, match=r"Ray makes 127\.0\.0\.9:6379 of auto"):
        require_cluster("auto")


def test_a_clusters_head_is_given_up_before_ray_ends_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times, answers = [0.0], [True]

    def ask(address: str, seconds: float) -> None:
        if not answers[0]:
            raise InputError("nothing listens")

    def look_at(now: float) -> None:
        times[0] = now
        watched.look()

    monkeypatch.setattr(head, "require_ray", ask)
    watched = RayHead("somewhere:6379", lambda: times[0])
    heard = 2 * EVERY
    for now in (EVERY, heard):
        look_at(now)
    answers[0] = False
    for now in (3 * EVERY, heard + GONE):
        look_at(now)
    assert not watched.alive()
    with pytest.raises(WorkerError, match="has not answered for 45 s; start it again"):
        look_at(heard + GONE + EVERY)
    assert watched.lost
    assert GONE + EVERY < 60  # then Ray would


def test_a_head_that_takes_its_time_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(address: str, seconds: float) -> None:
        if seconds < 3.0:
            raise InputError("what listens there is no Ray head (deadline_exceeded)")

    monkeypatch.setattr(head, "require_ray", ask)
    assert RayHead("somewhere:6379").alive()


def test_a_head_that_comes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now, back = [0.0], [20.0]

    def ask(address: str, seconds: float) -> None:
        if now[0] < back[0]:
            raise InputError("nothing listens")

    def pause(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(head, "require_ray", ask)
    RayHead("somewhere:6379", lambda: now[0]).wait(pause)
    assert now == back
    now[0], back[0] = 0.0, 1e6
    with pytest.raises(WorkerError, match=r"has not answered for 4\d s"):
        RayHead("somewhere:6379", lambda: now[0]).wait(pause)


@dataclass(frozen=True)
class Refusal:
    """What a head answers that wants another token, as gRPC tells it."""

    status: Any

    def code(self) -> Any:
        return self.status

    def details(self) -> str:
        return "InvalidAuthToken: Authentication token is missing or incorrect"


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        (
            "",
            r"this side sends none: set RAY_AUTH_MODE=token.*~/.ray/auth_token",
        ),
        ("token", r"has another token than this side: set RAY_AUTH_TOKEN"),
    ],
)
def test_a_token_that_is_not_sent_or_not_theirs(
    monkeypatch: pytest.MonkeyPatch, mode: str, told: str
) -> None:
    grpc = pytest.importorskip("grpc")
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    text = head._refused("somewhere:6379", Refusal(grpc.StatusCode.UNAUTHENTICATED))
    assert re.search(told, text)


def test_both_sides_need_one_version() -> None:
    with pytest.raises(InputError, match=r"has Ray 1\.0, and here is .*: both need the same"):
        head._require_version("somewhere:6379", "1.0")
