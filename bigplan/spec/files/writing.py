"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from bigplan.paths import exists, is_file


def write_whole(path: Path, data: str | bytes) -> None:
    """Write all of a file or nothing, also where the disk is full or the process is killed.

    What stood there before stays until then. A pipe or device, and a file in a folder that may not
    be written, are written in place. Raises OSError.
    """
    data = data.encode() if isinstance(data, str) else data
    target = path.resolve()  # a link stays one
    in_place = exists(path) and not (is_file(path) and os.access(target.parent, os.W_OK))
    if in_place:
        path.write_bytes(data)
        return
    beside = target.with_name(f"{target.name}.partial")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
