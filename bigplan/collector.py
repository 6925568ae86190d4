"""Python's collector of cycles looks rarely while a command or a search makes objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New objects between two collections. Importing and planning make a million that live as long as
# the command. With Python's default of 700, collections take a tenth of a plan's time.
COLLECTED = 1_000_000


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Within the block; a collector that the user has switched off (a threshold of 0) stays off."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(COLLECTED, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
