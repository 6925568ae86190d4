"""Importing by name, and environment variables that libraries read only during their import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def environment(**wanted: str) -> Iterator[None]:
    """Set the variables that the user has not set, for the length of the block."""
    added = wanted.keys() - os.environ.keys()
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def named(path: str) -> Any:
    """The object that "module:name" names, imported now."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
