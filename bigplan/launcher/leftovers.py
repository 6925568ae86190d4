"""What a launch leaves behind that was killed: its scratch, and processes of its Ray.

While a launch runs it is on a list in the user's state folder, by a file that it holds locked. The
kernel releases a dead process's locks, so a file without a lock belongs to a killed launch. On the
other machines of a Ray cluster one of the launch's ranks is on the list in its place.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from typing import IO

from bigplan.errors import InputError, RefusedError
from bigplan.launcher.lock import only_launch
from bigplan.spec.files.document import Spec, validate
from bigplan.spec.files.reading import read_json
from bigplan.units import counted, format_bytes

_SECONDS = 5.0  # for a killed process to end


class ListedLaunch(Spec):
    """A launch on the list."""

    host: str
    run: str
    scratch: str
    session: str | None = None
    """folder of the logs of its own Ray, which that Ray's processes have open"""


@dataclass
class Listed:
    """This launch's place on the list; without a file where none can be written."""

    entry: ListedLaunch
    file: IO[str] | None

    def ray(self, session: Path | None) -> None:
        """The launch has its own Ray now."""
        self.entry = self.entry.model_copy(update={"session": session and str(session)})
        self.write()

    def write(self) -> None:
        """Put it on the list as it is; in the same file, which is locked."""
        if self.file is None:
            return
        with suppress(OSError):  # a full disk: what is known of it stays
            self.file.seek(0)
            self.file.write(self.entry.model_dump_json())
            self.file.truncate()
            self.file.flush()


@contextmanager
def listed(run: Path, scratch: Path) -> Iterator[Listed]:
    """Have a launch on the list for the length of the block."""
    launch = Listed(
        ListedLaunch(host=socket.gethostname(), run=str(run), scratch=str(scratch)), None
    )
    path: Path | None = None
    with suppress(OSError, RuntimeError):  # a home that is read-only, or none
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = mkstemp(dir=folder)
        path, launch.file = Path(f"{name}.json"), os.fdopen(descriptor, "w")
        fcntl.flock(launch.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        launch.write()
        Path(name).rename(path)
    try:
        yield launch
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
        if launch.file is not None:
            launch.file.close()


def is_listed(scratch: Path) -> bool:
    """Whether a launch that runs is on this machine's list with that scratch."""
    return any(_is_held(path) for path, entry in _entries() if entry.scratch == str(scratch))


@dataclass(frozen=True)
class Leftover:
    """What one killed launch left: bytes of scratch, and processes."""

    listed: Path
    entry: ListedLaunch
    scratch: int
    processes: tuple[int, ...]

    def __str__(self) -> str:
        parts = []
        if self.scratch:
            parts.append(f"{format_bytes(self.scratch)} of scratch in {self.entry.scratch}")
        if self.processes:
            count = len(self.processes)
            parts.append(f"{counted(count, 'process', 'processes')} of its Ray")
        return f"left by a launch that was killed, of {self.entry.run}: {' and '.join(parts)}"


def leftovers() -> tuple[Leftover, ...]:
    """What all killed launches of this user left on this machine.

    A launch leaves the list if nothing is left of it and no running launch uses its scratch.
    """
    dead, used = dict[Path, ListedLaunch](), set[str]()
    for path, entry in _entries():
        if _is_held(path):
            used.add(entry.scratch)
        else:
            dead[path] = entry
    found = []
    for path, entry in dead.items():
        scratch = 0 if entry.scratch in used else _bytes(Path(entry.scratch))
        used.add(entry.scratch)  # the first that names it has it
        left = Leftover(path, entry, scratch, tuple(_writing_to(entry.session)))
        if left.scratch or left.processes:
            found.append(left)
        else:
            path.unlink(missing_ok=True)
    return tuple(found)


def clean(left: Leftover) -> None:
    """End the processes and remove the scratch.

    Raises RefusedError where another launch has the run meanwhile, or the scratch cannot be
    removed; the launch stays on the list.
    """
    if left.processes and left.entry.session is not None:
        end_processes(left.entry.session)
    if left.scratch:  # else there is none, or it is a running launch's
        run = Path(left.entry.run)
        with only_launch(run) if run.is_dir() else nullcontext():
            _remove(Path(left.entry.scratch))
    left.listed.unlink(missing_ok=True)


def end_processes(session: str) -> None:
    """End all processes of a Ray with that folder but this one, and wait until they have ended."""
    for process in _writing_to(session):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    end = time.monotonic() + _SECONDS
    while any(_writing_to(session)) and time.monotonic() < end:
        time.sleep(0.05)


def _remove(scratch: Path) -> None:
    if not scratch.exists():
        return
    try:
        shutil.rmtree(scratch)
    except OSError as error:
        raise RefusedError(f"{scratch} cannot be removed: {error.strerror}; remove it") from None


def _folder() -> Path:
    """Where the list is. Raises RuntimeError where there is no home."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path("~/.local/state").expanduser())
    return Path(base) / "bigplan" / "launches"


def _entries() -> Iterator[tuple[Path, ListedLaunch]]:
    """All on this machine's list, and their files."""
    try:
        files = sorted(_folder().glob("*.json"))
    except (OSError, RuntimeError):
        return
    for path in files:
        entry = _read(path)
        if entry is not None and entry.host == socket.gethostname():
            yield path, entry


def _read(path: Path) -> ListedLaunch | None:
    """None: it has ended meanwhile, or was cut off by a full disk."""
    try:
        return validate(read_json(path).data, ListedLaunch, str(path))
    except InputError:
        return None


def _is_held(path: Path) -> bool:
    with suppress(FileNotFoundError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # others may be looking, too
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks: nothing can be told
            return True
        return False
    return True  # it has ended just now, and cleaned up itself


def _bytes(folder: Path) -> int:
    """What is in a folder; 1 at least where it is there."""
    total = 0
    for inside, _, names in os.walk(folder):
        total += 1
        for name in names:
            with suppress(OSError):
                total += (Path(inside) / name).lstat().st_size
    return total


def _writing_to(folder: str | None) -> Iterator[int]:
    """Other processes of this user with a file below the folder open for writing, as its logs."""
    if folder is None:
        return
    for links in Path("/proc").glob("[0-9]*/fd"):
        try:
            if links.stat().st_uid != os.geteuid() or links.parent.name == str(os.getpid()):
                continue
            held = any(
                link.readlink().is_relative_to(folder) and link.lstat().st_mode & stat.S_IWUSR
                for link in links.iterdir()
            )
        except OSError:  # ended, or not ours to look at
            continue
        if held:
            yield int(links.parent.name)
