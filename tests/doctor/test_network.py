import socket
from pathlib import Path

import pytest

from bigplan.doctor import network


def test_what_listens_and_what_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server((network.LOOPBACK_ADDRESS, 0)) as server:
        monkeypatch.setattr(network, "DASHBOARD_AGENT", server.getsockname()[1])
        monkeypatch.setattr(network, "find_spec", lambda name: object())
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        monkeypatch.setattr(network, "leftovers", lambda: ("left by a launch",))
        found = {one.name: one for one in network.examine()}
    assert found["ports"].state == "good"
    assert "--address 10.0.0.1:6379" in found["cluster"].found
    assert found["Ray"].state == "note"
    assert (found["leftovers"].found, found["leftovers"].remedy) == (
        "left by a launch",
        "bigplan clean",
    )


def test_no_other_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "find_spec", lambda name: object())
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(network, "leftovers", lambda: ())
    with socket.socket() as taken:
        taken.bind((network.LOOPBACK_ADDRESS, 0))  # and nobody listens
        monkeypatch.setattr(network, "DASHBOARD_AGENT", taken.getsockname()[1])
        found = {one.name: one for one in network.examine()}
    assert found["Ray"].state == "good"
    assert "cluster" not in found


def test_a_machine_without_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr("bigplan.doctor.network.socket.create_server", refused)
    assert network._loopback().state == "bad"
