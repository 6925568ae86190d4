"""The folder that offloaded tensors and runs would go to."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bigplan.doctor.finding import Finding
from bigplan.paths import is_dir
from bigplan.units import format_bytes

TOPIC = "drive"
_IN_MEMORY = ("tmpfs", "ramfs")
_OVER_NETWORK = ("nfs", "nfs4", "cifs", "fuse.sshfs", "lustre", "ceph", "9p", "virtiofs")


def examine(folder: Path) -> Iterator[Finding]:
    """The folder's file system, whether it can be written past the page cache, and its room."""
    name = str(folder)
    if not is_dir(folder):
        yield Finding(TOPIC, name, "bad", "is no folder", "name one with --folder")
        return
    kind = file_system(folder.resolve())
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".bigplan-") as file:
            direct = _direct(file.name)
    except OSError as error:
        yield Finding(
            TOPIC, name, "bad", f"cannot be written: {error.strerror}", "name another with --folder"
        )
        return
    yield kind_finding(name, kind, direct)
    free = shutil.disk_usage(folder).free
    yield Finding(
        TOPIC, "room", "good", f"{format_bytes(free)} free for runs and offloaded tensors"
    )


def kind_finding(name: str, kind: str, direct: bool) -> Finding:
    """The meaning of this kind of file system for tensors on it."""
    if kind in _IN_MEMORY:
        return Finding(
            TOPIC,
            name,
            "note",
            f"is memory ({kind}), not a drive: tensors there take what the host has",
            "name a folder on a drive with --folder",
        )
    if kind in _OVER_NETWORK:
        return Finding(
            TOPIC,
            name,
            "note",
            f"is on another machine ({kind}): fine for runs, slow for offloaded tensors",
            "name a folder on an own drive with --folder, and in the cluster's nvme.path",
        )
    if not direct:
        return Finding(
            TOPIC,
            name,
            "note",
            f"{kind} refuses O_DIRECT: tensors go through the page cache, which takes host memory",
            "use ext4 or xfs on an own drive",
        )
    return Finding(TOPIC, name, "good", f"{kind}, read and written past the page cache")


def _direct(name: str) -> bool:
    """Whether the file opens with O_DIRECT."""
    try:
        os.close(os.open(name, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of file system that the folder is on, such as ext4."""
    best, kind = "", "unknown"
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return kind
    for line in lines:
        _, point, name, *_ = (*line.split(), "", "", "")
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and folder.is_relative_to(point or "/"):
            best, kind = point, name
    return kind
