"""The lines of metrics.jsonl as a run writes them: a full disk lets them wait, not the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bigplan.launcher.record import METRICS, Metric, read_metrics
from bigplan.spec.files.writing import write_whole


@dataclass
class MetricsFile:
    """A run's steps, on the disk or waiting for room there; `trouble` says why they wait."""

    folder: Path
    trouble: str = ""
    _waiting: list[Metric] = field(default_factory=list)

    def add(self, metric: Metric) -> None:
        """One more step, with all that wait. They go on waiting where there is no room."""
        self._waiting.append(metric)
        try:
            self._write()
        except OSError as error:
            self.trouble = str(error)

    def settle(self) -> None:
        """Flush all steps so far to the drive: no checkpoint may outlive the record of its step.

        Raises OSError.
        """
        self._write()
        with (self.folder / METRICS).open("ab") as file:
            os.fsync(file.fileno())

    def rewind(self, done: int) -> tuple[Metric, ...]:
        """Keep the steps up to `done`; what a run recorded after its checkpoint happens again.

        Raises InputError where the file is damaged, and OSError.
        """
        known = (*read_metrics(self.folder), *self._waiting)
        kept = tuple(metric for metric in known if metric.step <= done)
        write_whole(self.folder / METRICS, _lines(kept))
        self._waiting.clear()
        self.trouble = ""
        return kept

    def _write(self) -> None:
        """Append what waits, all of it or nothing: half a line would spoil the next one."""
        rest = _lines(self._waiting).encode()
        with (self.folder / METRICS).open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while rest:  # what fits is taken first; the next try tells why no more does
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(before)
                raise
        self._waiting.clear()
        self.trouble = ""


def _lines(metrics: Sequence[Metric]) -> str:
    return "".join(metric.model_dump_json(exclude_none=True) + "\n" for metric in metrics)
