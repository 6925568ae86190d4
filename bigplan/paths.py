"""Whether there is something at a path that a user names.

From Python 3.14 on pathlib answers no where the system refuses to look. A model in another user's
folder would be told to be missing, and a name longer than any file's would be found out after a
search.
"""

import errno
from pathlib import Path
from stat import S_ISDIR, S_ISREG

REFUSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


def exists(path: Path) -> bool:
    """Whether there is anything. Raises OSError where the path is one of the REFUSED."""
    return _mode(path) != 0


def is_file(path: Path) -> bool:
    """Whether there is a regular file. Raises as `exists`."""
    return S_ISREG(_mode(path))


def is_dir(path: Path) -> bool:
    """Whether there is a folder. Raises as `exists`."""
    return S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    """Kind and mode bits of what is there; 0: nothing is."""
    try:
        return path.stat().st_mode
    except ValueError:  # a zero byte in it
        return 0
    except OSError as error:
        if error.errno in REFUSED:
            raise
        return 0
