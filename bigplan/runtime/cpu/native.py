"""C++ compiled for this machine's CPU: an optimizer's update of many pieces in one call, and sums.

It is compiled on first use, in about three seconds, and kept in the user's cache folder. Its name
is made of everything that the result depends on. Calls leave the interpreter to other threads, and
the threads that they start never ask for it. Without a compiler torch's kernels do the work, with
the same bits except in sums of squares (runtime/optimizer/fused.py, runtime/cpu/gradient_sums.py).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import shlex
import stat
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from bigplan.mechanics import NICE
from bigplan.spec.detect.machine import COMPILERS, cache_folder, compiler

NAMES = ("step.cpp", "moments.cpp", "sums.cpp", "rows.cpp", "four_bits.cpp")
SOURCES = tuple(Path(__file__).with_name(name) for name in NAMES)
HEADERS = tuple(Path(__file__).with_name(name) for name in ("elements.h", "team.h"))
# No fused multiply-add that the source does not have; square roots and comparisons in vectors.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
OTHERS_WRITE = 0o022  # mode bits
# That a compilation may take: 9 s of a core, of which a busy machine gives it an eighth or less.
SECONDS = 600.0
TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # as elements.h counts them

_log = logging.getLogger(__name__)
_lock = Lock()


class Piece(NamedTuple):
    """1-D tensors of equal length on one device: fp32, except that the gradient may be 16-bit."""

    parameter: Tensor
    gradient: Tensor
    state: tuple[Tensor, ...] = ()  # the optimizer's moments
    copy: Tensor | None = None  # the parameter in 16 bits, written anew

    @property
    def elements(self) -> int:
        """Elements."""
        return self.parameter.numel()

    def part(self, start: int, stop: int) -> Piece:
        """Some of its elements."""
        state = tuple(tensor[start:stop] for tensor in self.state)
        copy = None if self.copy is None else self.copy[start:stop]
        return Piece(self.parameter[start:stop], self.gradient[start:stop], state, copy)

    def write_copy(self) -> None:
        """Cast the parameter, where a copy is kept."""
        if self.copy is not None:
            self.copy.copy_(self.parameter)


class Step(NamedTuple):
    """A function of step.cpp and its constants, in the order of its struct."""

    function: str
    constants: tuple[float, ...]


class _UpdatePart(ctypes.Structure):
    """As step.cpp has it."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("parameter", ctypes.c_void_p),
        ("moments", ctypes.c_void_p * 2),
        ("gradient", ctypes.c_void_p),
        ("copy", ctypes.c_void_p),
        ("gradient_type", ctypes.c_int32),
        ("copy_type", ctypes.c_int32),
        ("divisor", ctypes.c_float),
    )


class _Rows(ctypes.Structure):
    """As rows.cpp has it."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("total", ctypes.c_void_p),
        ("gradients", ctypes.c_void_p),
        ("total_type", ctypes.c_int32),
        ("gradient_type", ctypes.c_int32),
    )


class Team(ctypes.Structure):
    """As team.h has it."""

    _fields_ = (("threads", ctypes.c_int32), ("nice", ctypes.c_int32))


class Native:
    """The compiled functions."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.square_sum.restype = ctypes.c_double
        self._halves = {torch.bfloat16} | ({torch.float16} if self._library.has_fp16() else set())
        self._gradients = {torch.float32} | self._halves

    def takes(self, gradient: Tensor, copy: Tensor | None = None) -> bool:
        """Whether it reads and writes their dtypes: not every CPU converts fp16."""
        return gradient.dtype in self._gradients and (copy is None or copy.dtype in self._halves)

    def step(
        self, step: Step, pieces: Sequence[Piece], divisor: float = 1.0, threads: int = 1
    ) -> None:
        """Update parameters and moments in place, and write the copies, on so many threads.

        The pieces are contiguous and on the CPU. Gradients are divided by `divisor` in fp32 and
        stay as they are.
        """
        parts = (_UpdatePart * len(pieces))(*(_part(piece, divisor) for piece in pieces))
        constants = (ctypes.c_float * len(step.constants))(*step.constants)
        team = Team(threads, NICE)
        getattr(self._library, step.function)(
            parts, ctypes.c_int64(len(pieces)), constants, ctypes.byref(team)
        )

    def call(self, function: str, *structures: ctypes.Structure) -> None:
        """Call a function with the addresses of structures."""
        getattr(self._library, function)(*map(ctypes.byref, structures))

    def add(self, total: Tensor, part: Tensor, threads: int = 1) -> None:
        """Add `part` to `total`, contiguous and of one dtype and shape, as torch rounds it."""
        assert total.dtype == part.dtype, (total.dtype, part.dtype)
        assert total.shape == part.shape, (total.shape, part.shape)
        self._library.add(
            ctypes.c_void_p(total.data_ptr()), *_values(part), ctypes.byref(Team(threads, NICE))
        )

    def add_rows(
        self, total: Tensor, rows: Tensor, order: Tensor, gradients: Tensor, threads: int = 1
    ) -> None:
        """Add gradients[order[i]] to row rows[i] of `total`, whatever `threads` is the same.

        total [V, h], gradients [n, h], sorted rows and order int64 [n], all contiguous on the CPU.
        """
        assert all(each.is_contiguous() for each in (total, rows, order, gradients))
        assert len(rows) == len(order), (rows.shape, order.shape)
        assert total.shape[1] == gradients.shape[1], (total.shape, gradients.shape)
        places = (each.data_ptr() for each in (rows, order, total, gradients))
        types = TYPES[total.dtype], TYPES[gradients.dtype]
        self.call(
            "add_rows", _Rows(len(rows), total.shape[1], *places, *types), Team(threads, NICE)
        )

    def square_sum(self, values: Tensor, threads: int = 1) -> float:
        """The sum of contiguous values' squares (in fp32); it does not depend on `threads`."""
        team = Team(threads, NICE)
        return float(self._library.square_sum(*_values(values), ctypes.byref(team)))

    def pack(self, values: Tensor, bounds: Sequence[float], out: Tensor) -> None:
        """Blocks of 64 contiguous values as codes and a scale, into `out`.

        See runtime/linear/four_bits.py. Other threads have the interpreter meanwhile; this takes
        the one that calls.
        """
        assert out.is_contiguous(), out.stride()
        above = (ctypes.c_float * len(bounds))(*bounds)
        place, kind = ctypes.c_void_p(out.data_ptr()), ctypes.c_int32(TYPES[out.dtype])
        self._library.pack_four_bits(*_values(values), above, place, kind)


def _values(tensor: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]:
    """The values' address, number and type."""
    assert tensor.is_contiguous(), tensor.stride()
    count, kind = ctypes.c_int64(tensor.numel()), ctypes.c_int32(TYPES[tensor.dtype])
    return ctypes.c_void_p(tensor.data_ptr()), count, kind


def _part(piece: Piece, divisor: float) -> _UpdatePart:
    assert all(tensor.dtype == torch.float32 for tensor in (piece.parameter, *piece.state))
    return _UpdatePart(
        count=piece.elements,
        parameter=piece.parameter.data_ptr(),
        moments=(ctypes.c_void_p * 2)(*(moment.data_ptr() for moment in piece.state)),
        gradient=piece.gradient.data_ptr(),
        copy=None if piece.copy is None else piece.copy.data_ptr(),
        gradient_type=TYPES[piece.gradient.dtype],
        copy_type=0 if piece.copy is None else TYPES[piece.copy.dtype],
        divisor=divisor,
    )


def native() -> Native | None:
    """The functions for this machine, compiled once; None, with a warning, where that fails."""
    with _lock:
        return _native()


@cache
def _native() -> Native | None:
    try:
        return _made()
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning(
            "the CPU's updates go through torch's kernels: AdamW in mixed precision moves 36 bytes "
            "of host memory a parameter where compiled kernels move 30. Those need a C++ compiler "
            "(g++, clang++ or $CXX) that works: %s",
            _reason(error),
        )
        return None


def _made() -> Native:
    command = compiler()
    if command is None:
        raise FileNotFoundError(f"no C++ compiler: none of $CXX, {', '.join(COMPILERS)} is found")
    name = f"host-{_digest(command)}"
    try:
        return _kept(command, cache_folder(), name)
    except (OSError, RuntimeError):  # not writable, nothing there may run, or there is no home
        with TemporaryDirectory(prefix="bigplan-") as folder:
            return _kept(command, Path(folder), name)


def _digest(command: list[str]) -> str:
    """A digest of everything that the compiled file depends on."""
    version = subprocess.run(
        [*command, "--version"], check=True, capture_output=True, timeout=SECONDS
    ).stdout
    sources = (path.read_bytes() for path in (*SOURCES, *HEADERS))
    parts = (*sources, shlex.join(FLAGS).encode(), version, cpu().encode())
    return sha256(b"\0".join(parts)).hexdigest()[:20]


def cpu() -> str:
    """What -march=native looks at: the name and the flags of the first processor."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(_steady(first.splitlines()))


def _steady(lines: Iterable[str]) -> list[str]:
    """Lines of /proc/cpuinfo without clock rates and the like."""
    names = ("vendor_id", "cpu family", "model", "flags", "CPU ", "Features")
    return [line for line in lines if line.startswith(names)]


def _kept(command: list[str], folder: Path, name: str) -> Native:
    """From the folder; compiled first where it is not there yet. Raises OSError.

    Several processes may come to that at once: each moves a whole file to its place, whose name
    ends in the SHA-256 of what is in it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _keep_others_out(folder)
    for path in sorted(folder.glob(f"{name}-*.so")):
        if _is_whole(path):
            return Native(path)
        path.unlink()
    with TemporaryDirectory(dir=folder) as own:
        made = Path(own) / "made.so"
        subprocess.run(
            [*command, *FLAGS, *map(str, SOURCES), "-o", str(made)],
            check=True,
            capture_output=True,
            timeout=SECONDS,
        )
        made.chmod(0o600)
        _sync(made)
        path = made.replace(folder / f"{name}-{sha256(made.read_bytes()).hexdigest()}.so")
        _sync(folder)
    return Native(path)


def _is_whole(path: Path) -> bool:
    """Whether the file is whole, as this user's compiler made it.

    A file that was cut off would end the process when its missing pages are touched.
    """
    status = path.lstat()
    mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if not mine or status.st_mode & OTHERS_WRITE:
        return False
    return path.stem.endswith(f"-{sha256(path.read_bytes()).hexdigest()}")


def _keep_others_out(folder: Path) -> None:
    """Keep others from putting code there. Raises OSError if another user owns the folder."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "another user's folder", str(folder))
    if status.st_mode & OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)


def _sync(path: Path) -> None:
    """Put a file or a folder's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    """The first line of what the compiler said, else the error."""
    if isinstance(error, subprocess.CalledProcessError):
        said = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{shlex.join(error.cmd[:1])} failed: {said[0] if said else error.returncode}"
    return str(error)
