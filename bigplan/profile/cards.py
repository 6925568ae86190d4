"""How many network cards a node's collectives go through, as Linux lists them.

NCCL talks through every InfiniBand or RoCE device with an active port, and prefers the fastest;
where there is none, and in gloo, sockets of the one interface that the user names carry all. A bond
is as many cards as it has members.
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html: NCCL_IB_DISABLE, NCCL_IB_HCA)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SYS = Path("/sys/class")
_CHOSEN = ("NCCL_IB_HCA", "NCCL_NET", "NCCL_NET_PLUGIN")  # the user's own choice of cards


class Cards(NamedTuple):
    """How many, and where that is from."""

    number: int
    how: str


def cards(interface: str, *, cuda: bool, root: Path = SYS) -> Cards | None:
    """This node's; None where messages pass none, or nothing tells which ones."""
    if cuda and any(name in os.environ for name in _CHOSEN):
        return None
    if cuda and os.environ.get("NCCL_IB_DISABLE", "0") in ("", "0"):
        rates = [rate for rate in map(_rate, _listed(root / "infiniband")) if rate]
        if rates:
            fastest = max(rates)
            how = f"/sys/class/infiniband, active ones of {fastest:g} Gb/s"
            return Cards(rates.count(fastest), how)
    place = root / "net" / interface
    members = place / "bonding" / "slaves"
    if members.is_file():
        return Cards(max(1, len(members.read_text().split())), f"members of {interface}")
    if not (place / "device").exists():  # loopback, or a bridge of a container
        return None
    return Cards(1, f"sockets on {interface}")


def _listed(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())


def _rate(device: Path) -> float:
    """Gb/s of a device's fastest active port; 0: none is active."""
    ports = _listed(device / "ports")
    active = (port for port in ports if "ACTIVE" in (port / "state").read_text())
    return max((float((port / "rate").read_text().split()[0]) for port in active), default=0.0)
