"""When a step's phases began and ended: by the device's own clock on CUDA, by the host's else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bigplan.program import Lane, Op
from bigplan.runtime.result import Progress
from bigplan.timeline import Event, Timeline


class PassClock:
    """Collects the phases of one step; `timeline` waits for the device."""

    def __init__(self, device: torch.device, stage: int) -> None:
        self._device, self._stage = device, stage
        self._phases: list[tuple[Lane, Op, int, Any, Any]] = []
        self._doing: tuple[str, ...] = ()
        self._begun = self._now()

    @contextmanager
    def phase(self, op: Op, micro_batch: int, lane: Lane = Lane.COMPUTE) -> Iterator[None]:
        """What runs in the block is one event."""
        start, self._doing = self._now(), (f"{op.value} of micro-batch {micro_batch}",)
        yield
        self._phases.append((lane, op, micro_batch, start, self._now()))
        self._doing = ()

    def progress(self, before: int) -> Progress:
        """How far the step is, `before` phases after the run's first; any thread may ask."""
        return Progress(before + len(self._phases), self._doing)

    def timeline(self) -> Timeline:
        """The step so far."""
        end = self._now()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        events = tuple(
            Event(self._stage, lane, op, 0, number, self._since(start), self._since(stop))
            for lane, op, number, start, stop in self._phases
        )
        return Timeline(events, self._since(end))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _since(self, moment: Any) -> float:
        if self._device.type != "cuda":
            return float(moment - self._begun)
        return float(self._begun.elapsed_time(moment)) / 1e3
