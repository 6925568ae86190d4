"""The metrics as TensorBoard event files, written by tensorboardX; torch is not needed for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bigplan.launcher.record import Metric

FOLDER = "tensorboard"
_FIGURES = (
    "loss",
    "validation_loss",
    "learning_rate",
    "gradient_norm",
    "loss_scale",
    "tokens_per_second",
    "mfu",
    "seconds",
    "data_seconds",
    "restarts",
)


def scalars(metric: Metric) -> dict[str, float]:
    """What a step shows in TensorBoard, by tag."""
    figures = {name: getattr(metric, name) for name in _FIGURES}
    figures |= {f"memory/{tier}": nbytes for tier, nbytes in metric.memory.items()}
    for name in ("rewards", "validation_rewards"):
        figures |= {f"{name}/{each}": v for each, v in (getattr(metric, name) or {}).items()}
    return {tag: float(value) for tag, value in figures.items() if value is not None}


@contextmanager
def _torch_out_of_sight() -> Iterator[None]:
    """Hide torch: tensorboardX would import it if it can, which takes seconds and 300 MB."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment] # Python's way to say: not installed
    try:
        yield
    finally:
        del sys.modules["torch"]


class EventFile:
    """One event file of a run that goes on after step `done`; `trouble` says why it ended early.

    Events are written step by step in the caller's thread. tensorboardX's own writer thread dies of
    a full disk, and its queue then blocks the caller at the eleventh event.
    """

    def __init__(self, run: Path, done: int) -> None:
        self.trouble = ""
        self._file: Any = None
        if find_spec("tensorboardX") is None:
            self.trouble = "tensorboardX is not installed: pip install 'bigplan[launch]'"
            return
        with _torch_out_of_sight():
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder = run / FOLDER
        try:
            folder.mkdir(exist_ok=True)
            again = any(folder.iterdir())
            # Names hold whole seconds only: the process keeps two files of one second apart.
            self._file = EventsWriter(str(folder / "events"), f".{os.getpid()}")
            if again:  # hide what an earlier file says of later steps
                log = SessionLog(status=SessionLog.START)
                self._file.write_event(Event(wall_time=time.time(), step=done + 1, session_log=log))
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def add(self, metric: Metric) -> None:
        """One more step."""
        if self._file is None:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=t, simple_value=v) for t, v in scalars(metric).items()]
        event = Event(wall_time=time.time(), step=metric.step, summary=Summary(value=values))
        try:
            self._file.write_event(event)
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what is left."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.trouble = f"the event file cannot be written: {error.strerror}"
        self._file = None
