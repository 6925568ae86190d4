"""A process that compiles the library of the CPU's update, beside others that do."""

from __future__ import annotations

import os
from pathlib import Path

from bigplan.runtime.cpu.native import native


def compile_it(_: int, folder: str) -> None:
    """With the compiler `both` of the folder, into the folder's cache."""
    place = Path(folder)
    os.environ |= {"XDG_CACHE_HOME": str(place / "cache"), "CXX": str(place / "both")}
    assert native() is not None
