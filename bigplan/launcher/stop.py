"""SIGINT, SIGTERM, and SIGHUP of a terminal that closes.

The first asks for an end after the running step, the second ends at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Catches them for the length of a `with` block.

    Until it is `patient` even the first signal raises KeyboardInterrupt: there is nothing to save.
    """

    def __init__(self) -> None:
        self.patient = False
        self.asked = False
        self._terminals = [number for number in (1, 2) if os.isatty(number)]  # stdout and stderr
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _to_nowhere(self._terminals)
        again, self.asked = self.asked, True
        if again or not self.patient:
            raise KeyboardInterrupt

    def look(self) -> None:
        """Raise the first signal's KeyboardInterrupt if it was lost on its way.

        Python raises it in the code that runs at that moment. In a finaliser, or in a callback of
        a library, Python drops it.
        """
        if self.asked and not self.patient:
            raise KeyboardInterrupt


def _to_nowhere(terminals: Sequence[int]) -> None:
    """Drop what is written there: with its terminal gone it would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in terminals:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
