"""The operating system beneath: planning takes any, what trains and measures wants Linux."""

from __future__ import annotations

import signal
import sys

from bigplan.errors import RefusedError

_NAMES = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}
SYSTEM = _NAMES.get(sys.platform, sys.platform)

ENDING = tuple(
    signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if name in signal.Signals.__members__
)
"""what asks a process to end: a terminal that closes does not on Windows"""


def require_locks(what: str) -> None:
    """Raise RefusedError on Windows, which lacks the locks of files that others have."""
    if SYSTEM == "Windows":
        require_linux(what)


def require_linux(what: str) -> None:
    """Raise RefusedError where this is another system; `what` is a command, such as launch."""
    if SYSTEM != "Linux":
        raise RefusedError(
            f"`bigplan {what}` needs Linux, and this is {SYSTEM}: plans are made anywhere and run "
            "on Linux (on Windows, WSL 2 is one); a machine is described by hand with `like` in a "
            "cluster file (docs/usage.md)"
        )
