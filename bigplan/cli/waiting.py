"""What a person sees and can do during a search: its state, a time limit, Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from math import isfinite
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console

from bigplan.interrupted import ToldInterrupt
from bigplan.report.text import seconds_text
from bigplan.units import counted

if TYPE_CHECKING:  # most plans are found before anything is shown
    from rich.status import Status

SILENT = 1.0  # seconds; a shorter search shows nothing


class Waiting:
    """A search's state on stderr, on a terminal only, after its first second.

    Ctrl-C ends the search with its best plan so far. It ends the program where there is none yet,
    or unless the caller `keeps_best`.
    """

    def __init__(
        self, title: str, time_limit: float | None = None, *, keeps_best: bool = True
    ) -> None:
        self._title = title
        self._keeps_best = keeps_best
        self._limit = time_limit
        self._start = time.perf_counter()
        self._console: Console | None = None  # from the first second on
        self._status: Status | None = None
        self.interrupted = False
        self._before: signal._HANDLER = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._status is not None:
            self._status.stop()
        if self.interrupted and (error is not None or not self._keeps_best):
            told = f"bigplan: {self._title}: interrupted, and there is no answer to keep"
            Console(stderr=True).print(told, highlight=False, markup=False, soft_wrap=True)
            raise ToldInterrupt from error

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._start

    @property
    def in_time(self) -> bool:
        """Whether neither Ctrl-C nor the time limit ended it."""
        return not self.interrupted and (self._limit is None or self.seconds < self._limit)

    def go_on(self, best: float | None, bound: float, left: int) -> bool:
        """Show how the search stands; whether it should go on.

        `best`: seconds of the best plan so far; without one a time limit does not end the search.
        """
        if self._shows():
            self._show(progress_text(self._title, best, bound, left))
        return not self.interrupted and (self.in_time or best is None)

    def _shows(self) -> bool:
        """Whether there is a terminal, and the search takes long enough."""
        if self._console is None and self.seconds >= SILENT:
            self._console = Console(stderr=True)
        return self._console is not None and self._console.is_terminal

    def _show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
        elif self._console is not None:
            self._status = self._console.status(text)
            self._status.start()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:  # the second Ctrl-C
            raise KeyboardInterrupt
        self.interrupted = True


def progress_text(title: str, best: float | None, bound: float, left: int) -> str:
    """One line: best so far, bound, strategies left."""
    found = "no plan yet" if best is None else f"best so far {seconds_text(best)}"
    least = f", none below {seconds_text(bound)}" if isfinite(bound) else ""
    return f"{title}: {found}{least}, {counted(left, 'strategy', 'strategies')} left"
