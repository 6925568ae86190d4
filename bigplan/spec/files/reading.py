"""The one way in for files that users hand in: regular, not too large, UTF-8, bounded JSON.

No file may hang the reader or use up its memory. A pipe or device is refused before it is read.
Depth, the digits of numbers and the number of values are bounded. Training data (texts, tokens,
weights) is read elsewhere, piece by piece.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bigplan.errors import InputError, quoted
from bigplan.paths import is_file

DESCRIPTION: Final = 16 * 2**20
"""bytes of a description; the largest plans have one or two million"""
INDEX: Final = 256 * 2**20
"""bytes of a list of tensors or of a vocabulary: a model with 100,000 tensors lists 10 million"""
RECORD: Final = 2**30
"""bytes of what a run writes about itself, which grows with its steps"""

DEEPEST: Final = 64
"""values inside of each other; descriptions have up to ten"""
TOO_DEEP: Final = f"nested too deeply: more than {DEEPEST} values inside of each other"
LONGEST_NUMBER: Final = 100
"""characters; a float's shortest exact text has up to 24"""

# Opens even a pipe that nobody writes to, instead of waiting for a writer. Windows has one of these
# flags alone, without which it takes \x1a for the end of a file.
_FLAGS = "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"
_OPENED = sum((getattr(os, name, 0) for name in _FLAGS), os.O_RDONLY)

# What a folder may hold that is meant where a file is wanted.
_HELD = ("plan.yaml", "config.json", "manifest.json")
# Strings, brackets, colons and numbers, in order. A string without an end reaches to the end of the
# text, so that no character is scanned twice. Digits within a word are no number.
_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[{}\[\]:]|-?Infinity|NaN|-?(?<!\w)\d[\d.eE+-]*', re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON text's data, and the lines (from 1) of its outermost keys.

    A key within an outermost one is named "outer.inner".
    """

    data: Any
    lines: Mapping[str, int]


def read_bytes(path: Path, most: int = DESCRIPTION) -> bytes:
    """A regular file's bytes, `most` at most. Raises InputError.

    The opened descriptor is checked, so that no other file can take its place in between.
    """
    try:
        descriptor = os.open(path, _OPENED)
        try:
            _require_regular(path, os.fstat(descriptor))
            content = _up_to(descriptor, most + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InputError(_unreadable(path, error)) from None
    except ValueError as error:
        raise _no_path(path, error) from None
    if len(content) > most:
        raise InputError(
            f"{path}: has more than {most >> 20} MiB, and no such file is that large; "
            "check that it is the file you mean"
        )
    return content


def _up_to(descriptor: int, most: int) -> bytes:
    """All of the file, or its first `most` bytes, because its stated size may be wrong."""
    pieces: list[bytes] = []
    while most > 0 and (piece := os.read(descriptor, min(most, DESCRIPTION))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def _require_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        held = next((name for name in _HELD if is_file(path / name)), "")
        which = f"a file in it, such as {path / held}" if held else "the file in it"
        raise InputError(f"{path} is a folder, not a file; name {which}")
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is a pipe or a device, which is not read; name a regular file")


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{quoted(path)}: no such file; check the path"
    return f"{quoted(path)}: cannot be read: {error.strerror}"


def _no_path(path: Path | str, error: ValueError) -> InputError:
    """The InputError for Python's ValueError about a path, unless it is already one."""
    if isinstance(error, InputError):
        return error
    return InputError(f"{quoted(path)}: a path holds no NUL; correct it")


def require_regular(path: Path) -> None:
    """Raise InputError where a library that opens files by name would wait or never end."""
    try:
        _require_regular(path, path.stat())
    except OSError as error:
        raise InputError(_unreadable(path, error)) from None
    except ValueError as error:
        raise _no_path(path, error) from None


def read_text(path: Path, most: int = DESCRIPTION) -> str:
    """The file's text, its lines ended by newlines. Raises InputError."""
    content = read_bytes(path, most)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Utf-8-sig counts positions from behind the byte order mark.
        skipped = len(content) - len(error.object)
        start = error.start + skipped
        line = content.count(b"\n", 0, start) + 1
        raise InputError(
            f"{path}:{line}: byte {start} is not UTF-8 text; save the file as UTF-8"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, most: int = DESCRIPTION) -> Json:
    """What a JSON file holds. Raises InputError with file and line."""
    return parse_json(read_text(path, most), str(path))


def parse_json(text: str, name: str, first_line: int = 1) -> Json:
    """Data of a JSON text that begins on line `first_line` of `name`. Raises InputError.

    It also refuses repeated keys, depth, long numbers and NaN, which JSON allows.
    """
    scan = _Scan(text, first_line)
    for line, problem in scan.problems():
        raise InputError(f"{name}:{line}: {problem}")
    try:
        return Json(json.loads(text), scan.lines)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise InputError(f"{name}:{line}: not JSON: {error.msg}; correct it") from None


@dataclass
class _Scan:
    """A scan of a text's tokens before it is parsed; text that is no JSON is left to json."""

    text: str
    line: int
    lines: dict[str, int] = field(default_factory=dict)
    _seen: int = 0
    # Keys of each open object, with their lines.
    _open: list[dict[str, int]] = field(default_factory=list)

    def problems(self) -> Iterator[tuple[int, str]]:
        """Line and text of each breach of the bounds, and of each repeated key."""
        string: str | None = None
        for match in _TOKEN.finditer(self.text):
            token = match[0]
            if token[0] == '"':
                string = token
                string_at = match.start()
                continue
            problem = None
            if token == ":":
                problem = None if string is None else self._key(string, string_at)
            else:
                self._advance(match.start())
                problem = self._value(token)
            string = None
            if problem:
                yield self.line, problem

    def _advance(self, position: int) -> None:
        self.line += self.text.count("\n", self._seen, position)
        self._seen = position

    def _value(self, token: str) -> str | None:
        if token in "{[":
            self._open.append({})
            if len(self._open) > DEEPEST:
                return f"{TOO_DEEP}; correct it"
        elif token in "}]":
            del self._open[-1:]
        elif problem := number_problem(token):
            return problem
        return None

    def _key(self, string: str, position: int) -> str | None:
        self._advance(position)
        try:
            key = json.loads(string)
        except ValueError:  # no JSON, as the parser will report
            return None
        if not self._open:
            return None
        keys = self._open[-1]
        if key in keys:
            return f"duplicate key {quoted(key)} (first on line {keys[key]}); remove one"
        keys[key] = self.line
        if len(self._open) == 1:
            self.lines[key] = self.line
        elif len(self._open) == 2 and self._open[0]:  # a list's entry stays empty
            self.lines[f"{next(reversed(self._open[0]))}.{key}"] = self.line
        return None


def number_problem(text: str) -> str | None:
    """Why a number in this spelling is refused; None: it is not."""
    if len(text) > LONGEST_NUMBER:
        return (
            f"a number of {len(text)} characters ({quoted(text)}); "
            f"write one of at most {LONGEST_NUMBER}"
        )
    try:
        value = float(text)
    except ValueError:  # such as 1.2.3, which the parser refuses
        return None
    if not math.isfinite(value):
        return f"{text} is not a finite number, as every figure must be; correct it"
    return None


def user_path(text: str) -> Path:
    """The path that a user wrote, `~` expanded. Raises InputError for an impossible path."""
    try:
        path = Path(text).expanduser()
        path.stat()
    except RuntimeError:
        raise InputError(
            f"{quoted(text)}: there is no such home folder; write the path out"
        ) from None
    except ValueError as error:
        raise _no_path(text, error) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"{quoted(text)}: {error.strerror}; check the path") from None
    return path
