"""TOML under the limits that YAML and JSON have."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bigplan.errors import InputError, quoted
from bigplan.spec.files.reading import DEEPEST, TOO_DEEP, number_problem, read_text

LARGEST_BITS = 300  # of an integer: under a hundred digits


def read_toml(path: Path) -> dict[str, Any]:
    """The data of a TOML file. Raises InputError."""
    text = read_text(path)
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{path}: {TOO_DEEP}; correct it") from None
    except ValueError as error:  # TOMLDecodeError, and integers too long for Python
        raise InputError(f"{path}: not TOML: {error}; correct it") from None
    for problem in _problems(data, 1):
        raise InputError(f"{path}: {problem}")
    return data


def _problems(value: object, depth: int) -> Iterator[str]:
    if depth > DEEPEST:
        yield f"{TOO_DEEP}; correct it"
        return
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _problems(each, depth + 1)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
            yield f"{quoted(value)} has too many digits; correct it"
        elif problem := number_problem(repr(value)):
            yield problem
