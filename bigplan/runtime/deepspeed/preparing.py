"""Building DeepSpeed's operators before a run, in a process of their own. Needs no torch."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from bigplan.errors import PreflightError

SOON = 5.0  # seconds: to find that all are built takes less


def build_apart(names: Sequence[str], device: str, waiting: Callable[[float], None]) -> None:
    """Build them, where they are not there yet; `waiting` is told the seconds, one by one.

    Raises PreflightError.
    """
    command = [sys.executable, "-m", "bigplan.runtime.deepspeed.ops", *names, "--device", device]
    begun = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            errors = _watched(process, lambda: waiting(time.monotonic() - begun))
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()] or ["no message"]
        raise PreflightError(lines[-1])


def _watched(process: subprocess.Popen[str], waiting: Callable[[], None]) -> str:
    while True:
        try:
            return process.communicate(timeout=1.0)[1]
        except subprocess.TimeoutExpired:
            waiting()
