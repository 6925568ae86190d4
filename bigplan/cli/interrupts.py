"""SIGTERM, and SIGHUP of a terminal that closes, for commands that do not run a training."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from bigplan.interrupted import ToldInterrupt
from bigplan.system import ENDING

INTERRUPTED = 130

_Handler = Callable[[int, FrameType | None], None]


@contextmanager
def ended_by(*numbers: signal.Signals) -> Iterator[None]:
    """Let these signals end the process with a sentence, for the length of the block.

    Unlike KeyboardInterrupt, which is told and passes, this works while modules are imported:
    Python drops exceptions in the import system's callbacks.
    """
    with _handled(numbers, _end):
        try:
            yield
        except ToldInterrupt:
            raise
        except KeyboardInterrupt:
            _tell(signal.SIGINT)
            raise ToldInterrupt from None


@contextmanager
def unwound() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt for a block that removes what it wrote."""
    with _handled(ENDING, _unwind):
        yield


@contextmanager
def _handled(numbers: Iterable[signal.Signals], handler: _Handler) -> Iterator[None]:
    """What is ignored stays so: `nohup` ignores SIGHUP."""
    before: dict[signal.Signals, signal._HANDLER] = {}
    if threading.current_thread() is threading.main_thread():
        taken = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _unwind(number: int, frame: FrameType | None) -> None:
    _tell(number)
    raise ToldInterrupt


def _end(number: int, frame: FrameType | None) -> None:
    _tell(number)
    os._exit(INTERRUPTED)


def _tell(number: int) -> None:
    with suppress(OSError):  # nobody listens any more
        os.write(2, f"bigplan: interrupted by {signal.Signals(number).name}\n".encode())
