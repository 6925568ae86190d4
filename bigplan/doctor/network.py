"""Ports and interfaces, Ray, and leftovers of killed launches."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec

from bigplan.doctor.finding import Finding
from bigplan.launcher.leftovers import leftovers
from bigplan.launcher.preflight import LOOPBACK, interfaces

TOPIC = "network and Ray"
LOOPBACK_ADDRESS = "127.0.0.1"
DASHBOARD_AGENT = 52365  # the port of a local Ray's agent, which another Ray may have taken


def examine() -> Iterator[Finding]:
    """Whether ranks can talk here, on which interfaces elsewhere, and which Rays run."""
    yield _loopback()
    found = interfaces()
    others = [f"{name} ({address})" for name, address in found.items() if name != LOOPBACK]
    told = ", ".join(others) or "none but loopback"
    yield Finding(TOPIC, "interfaces", "good", f"{told}; several nodes need --interface NAME")
    if find_spec("ray") is not None:
        yield from _ray()
    for left in leftovers():
        yield Finding(TOPIC, "leftovers", "note", str(left), "bigplan clean")


def _loopback() -> Finding:
    try:
        with socket.create_server((LOOPBACK_ADDRESS, 0)):
            return Finding(TOPIC, "ports", "good", "processes can listen on loopback")
    except OSError as error:
        told = f"nothing can listen on {LOOPBACK_ADDRESS}: {error.strerror}"
        return Finding(TOPIC, "ports", "bad", told, "allow loopback in the sandbox or firewall")


def _ray() -> Iterator[Finding]:
    if address := os.environ.get("RAY_ADDRESS"):
        told = f"RAY_ADDRESS names {address}; launches start a local Ray all the same"
        yield Finding(TOPIC, "cluster", "good", f"{told}, or take that with --address {address}")
    if _taken(DASHBOARD_AGENT):
        yield Finding(
            TOPIC,
            "Ray",
            "note",
            f"something listens on port {DASHBOARD_AGENT}, most likely another Ray of this machine",
            "two can run side by side; `ray status` says which one that is",
        )
    else:
        yield Finding(TOPIC, "Ray", "good", "no other Ray runs here; a launch starts its own")


def _taken(port: int) -> bool:
    with socket.socket() as asked:
        asked.settimeout(0.5)
        return asked.connect_ex((LOOPBACK_ADDRESS, port)) == 0
