"""What every node is asked before anything is allocated, and what must be alike."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from bigplan.errors import PreflightError
from bigplan.installed import version_of
from bigplan.version import __version__

LOOPBACK = "lo"
CLOCKS_APART = 1.0  # seconds; beyond them nodes' records cannot be put in order
MARK = ".bigplan-seen-from-"  # start of a file's name; the file shows who shares a folder
_ADDRESS_OF = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class Facts:
    """What a rank found on its machine."""

    node: str  # Ray's key of it
    versions: Mapping[str, str]
    gpu: str  # its type; empty: none
    shared: bool  # whether the run folder is the launch's own
    drive: str  # what is wrong with the folder for offloaded tensors; empty: nothing
    interfaces: Mapping[str, str]  # name to IPv4 address
    left: tuple[str, ...] = ()  # by launches that were killed


def look(
    node: str, scratch: Path, mark: Path, token: str, left: tuple[str, ...] = (), *, cuda: bool
) -> Facts:
    """This machine, as a rank sees it; `mark` is a file of the launch that holds `token`."""
    try:
        shared = mark.read_text() == token
    except OSError:
        shared = False
    gpu = _gpu() if cuda else ""
    return Facts(node, versions(), gpu, shared, _drive(scratch), interfaces(), left)


def versions() -> dict[str, str]:
    """Versions that must be the same on all nodes."""
    found = {"bigplan": __version__, "Python": platform.python_version()}
    return found | {package: version_of(package) or "none" for package in ("torch", "ray")}


def interfaces() -> dict[str, str]:
    """The machine's network interfaces that have an IPv4 address."""
    return dict(_interfaces())


def _interfaces() -> Iterator[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asked, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
            except OSError:  # no address
                continue
            yield name, socket.inet_ntoa(found[20:24])


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none that torch sees"


def _drive(scratch: Path) -> str:
    """What keeps this process from writing there."""
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=scratch) as trial:  # other ranks of this node try as well
            trial.write(b"x")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def require_alike(facts: Mapping[str, Facts], scratch: Path) -> None:
    """Raise PreflightError where nodes' software differs, or one cannot write to its drive.

    `facts`: of one rank of each node, by the node's name.
    """
    for name, fact in facts.items():
        if fact.drive:
            raise PreflightError(
                f"node {name} cannot write to {scratch}, where offloaded tensors go: {fact.drive}; "
                "mount a drive there, or name another path in the cluster's `nvme`"
            )
    (first, one), *others = facts.items()
    for name, fact in others:
        for what, number in one.versions.items():
            if fact.versions.get(what) != number:
                raise PreflightError(
                    f"node {first} has {what} {number}, node {name} {fact.versions.get(what)}; "
                    "install the same versions on every node"
                )


def require_same_gpu(facts: Mapping[str, Facts]) -> None:
    """Raise PreflightError where the GPUs of nodes that a plan takes for equal differ."""
    (first, one), *others = facts.items()
    for name, fact in others:
        if fact.gpu != one.gpu:
            raise PreflightError(
                f"node {first} has {one.gpu}, node {name} {fact.gpu}; the plan takes both for "
                "equal: launch on nodes that are alike, or plan for groups of unlike nodes"
            )


def require_clock(name: str, before: float, there: float, after: float) -> None:
    """Raise PreflightError for a node whose clock said `there` between two looks at this one's."""
    apart = max(before - there, there - after)
    if apart > CLOCKS_APART:
        raise PreflightError(
            f"the clock of node {name} is {apart:.1f} s away from this machine's; at most "
            f"{CLOCKS_APART:g} s is allowed: let both follow one time server (chrony, or "
            "systemd-timesyncd)"
        )


def interface_of(facts: Mapping[str, Facts], wanted: str | None, *, outside: bool) -> str:
    """The interface that ranks listen on, by name: the same on all nodes.

    `outside`: whether any node has to be reached from another machine. Then ranks listen only on an
    interface that the user has named, because gloo and NCCL accept every connection. Raises
    PreflightError.
    """
    if len(facts) == 1 or (wanted is None and not outside):
        return LOOPBACK
    if wanted is None:
        told = "; ".join(f"{name} has {_listed(fact)}" for name, fact in facts.items())
        raise PreflightError(
            f"ranks of {len(facts)} nodes talk over sockets without authentication, which listen "
            f"on an interface that you name: --interface NAME ({told})"
        )
    for name, fact in facts.items():
        if wanted not in fact.interfaces:
            raise PreflightError(
                f"--interface {wanted}: node {name} has {_listed(fact)}, none of that name"
            )
    return wanted


def _listed(fact: Facts) -> str:
    return ", ".join(f"{name} ({address})" for name, address in fact.interfaces.items())


def listen_on(interface: str) -> None:
    """Let this process talk to other ranks there alone; before it meets them."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # "=": no other that begins like it
