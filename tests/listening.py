"""Where a process of this machine takes connections, as Linux lists them."""

import socket
from collections.abc import Iterator
from pathlib import Path

LISTENS = "0A"  # a socket's state in /proc/net/tcp


def _inodes(process: int) -> set[str]:
    """Of the sockets that a process has open."""
    links = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            links.append(str(link.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
    return {
        link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket")
    }


def listening(process: int) -> Iterator[tuple[str, int]]:
    """Addresses and ports on which a process takes connections; none of one that has ended."""
    try:
        mine = _inodes(process)
        tables = [Path(f"/proc/{process}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    except (FileNotFoundError, ProcessLookupError):
        return
    for table, family in zip(tables, (socket.AF_INET, socket.AF_INET6), strict=True):
        for line in table.splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and rest[5] in mine:
                address, _, port = local.partition(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                yield socket.inet_ntop(family, b"".join(words)), int(port, 16)
