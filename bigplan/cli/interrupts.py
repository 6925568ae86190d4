"""SIGTERM, and SIGHUP of a terminal that closes, where a command has nothing to save.

Unlike KeyboardInterrupt, this works while modules are imported: Python drops exceptions in the
import system's callbacks.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130


@contextmanager
def ended_by(*numbers: signal.Signals) -> Iterator[None]:
    """Let these signals end the process with a sentence, for the length of the block.

    What is ignored stays so: `nohup` ignores SIGHUP. KeyboardInterrupt is told, and passes.
    """
    before: dict[signal.Signals, signal._HANDLER] = {}
    if threading.current_thread() is threading.main_thread():
        taken = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, _end) for number in taken}
    try:
        yield
    except KeyboardInterrupt:
        _tell(signal.SIGINT)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    _tell(number)
    os._exit(INTERRUPTED)


def _tell(number: int) -> None:
    with suppress(OSError):  # nobody listens any more
        os.write(2, f"bigplan: interrupted by {signal.Signals(number).name}\n".encode())
