"""Environment variables that libraries look at only while they are imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def environment(**wanted: str) -> Iterator[None]:
    """These variables, where the user has not set them, for the length of the block."""
    added = wanted.keys() - os.environ.keys()
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
