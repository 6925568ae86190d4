"""Standard output that fails: characters it lacks, a full disk, a closed pipe."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from bigplan.errors import OutputError

PLAINLY = "bigplan.plainly"
_PLAIN = {"█": "#", "░": "-", "·": ".", "…": "~"}  # a bar of question marks would tell nothing


@contextmanager
def checked_output() -> Iterator[None]:
    """All that is printed within has left the program at the end. Raises OutputError."""
    before = sys.stdout, sys.stderr
    out, err = _checked(sys.stdout, told=True), _checked(sys.stderr, told=False)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        if out is not None:
            out.flush()  # a failure in the interpreter's own flush, at exit, would look like a bug


def _checked(stream: Any, *, told: bool) -> Any:
    """The checked stream; None where the caller closed it, so that print writes nowhere."""
    if stream is None:
        return None
    if isinstance(stream, io.TextIOWrapper):
        # Bars have characters that ASCII lacks, and a file's name may be invalid in UTF-8.
        codecs.register_error(PLAINLY, _plainly)
        stream.reconfigure(errors=PLAINLY)
    return _Checked(stream, told=told)


def _plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lost = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in lost), error.end


class _Checked:
    """A stream whose failure is no bug of the printing command, so no OSError there.

    Once the other end of a pipe is closed, the rest is dropped and the command ends as usual: `|
    head` has what it wanted, and a training need not stop. On standard error every failure is
    handled so, because it could not be reported.
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
        """Drop what still waits in buffers, and all that follows."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
