"""Standard output that cannot take what is printed: characters it lacks, full disk, closed pipe."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from bigplan.errors import OutputError


@contextmanager
def checked_output() -> Iterator[None]:
    """Whatever is printed meanwhile has left the program at the end. Raises OutputError."""
    before = sys.stdout, sys.stderr
    out, err = _checked(sys.stdout, told=True), _checked(sys.stderr, told=False)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        if out is not None:
            out.flush()  # what fails in the interpreter's own flush, at exit, is told as a bug


def _checked(stream: Any, *, told: bool) -> Any:
    """None where whoever started the program closed the stream: print writes nowhere then."""
    if stream is None:
        return None
    if isinstance(stream, io.TextIOWrapper):
        # Tables have lines that ASCII lacks, and a file's name may be no text even in UTF-8.
        stream.reconfigure(errors="replace")
    return _Checked(stream, told=told)


class _Checked:
    """A stream whose failing is no bug of the command that prints, so not an OSError there.

    Once nobody reads the other end of a pipe the rest goes nowhere and the command ends as it
    would have: `| head` is content with what it got, and a training need not stop for it. Of
    standard error every failure is taken so: it could not be `told`.
    """

    def __init__(self, stream: TextIO, *, told: bool) -> None:
        self._stream, self._told = stream, told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._telling():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._telling():
            self._stream.flush()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._discard()
            if isinstance(error, BrokenPipeError) or not self._told:
                return
            raise OutputError(
                f"standard output cannot be written: {error.strerror}; make room where it goes, "
                "or send it elsewhere"
            ) from None

    def _discard(self) -> None:
        """Send what still waits in buffers, and all that follows, nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
