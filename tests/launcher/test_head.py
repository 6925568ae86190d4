"""What is asked of Ray's head, without a Ray."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from bigplan.errors import InputError, WorkerError
from bigplan.launcher import head
from bigplan.launcher.head import EVERY, GONE, Head, require_ray

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
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(InputError, match=f"nothing listens at {address}"):
        require_ray(address)


@pytest.mark.parametrize("address", ["auto", "ray://somewhere:10001", "somewhere"])
def test_other_kinds_of_addresses_are_rays_to_judge(address: str) -> None:
    require_ray(address)


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
    watched = Head("somewhere:6379", lambda: times[0])
    heard = 2 * EVERY
    for now in (EVERY, heard):
        look_at(now)
    answers[0] = False
    for now in (3 * EVERY, heard + GONE):
        look_at(now)
    with pytest.raises(WorkerError, match="has not answered for 45 s; start it again"):
        look_at(heard + GONE + EVERY)
    assert watched.lost
    assert GONE + EVERY < 60  # then Ray would
