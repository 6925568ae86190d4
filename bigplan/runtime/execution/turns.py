"""Copies to the host that take turns: activations in pieces, chunks of state between them.

The GPU's engine for copies to the host goes on with one stream as long as that stream has copies.
If all activations of a micro-batch were queued, a chunk of state would wait for all of them, and
the next chunks with it. If one piece were queued at a time, the engine would stand still until a
thread wakes up and queues the next piece; that costs a tenth of the link. So two pieces are queued
while no chunk waits to leave. While a chunk waits, a piece is queued once those before it have
arrived.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from bigplan.mechanics import PIECE_BYTES, PIECES_AHEAD
from bigplan.runtime.layers.kept import queue_copy


class Turns:
    """Who queues copies to the host, and when. Activations and chunks have a thread each."""

    def __init__(self) -> None:
        self._pieces: deque[torch.cuda.Event] = deque()  # their ends
        self._open = 0  # bytes queued since the end of the last
        self._chunk: torch.cuda.Event | None = None  # the end of the last one

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of uint8 [n] on the current stream, from the CPU copy at once.

        Small copies make a piece together, also with those of later calls.
        """
        for start in range(0, source.numel(), PIECE_BYTES):
            part = source[start : start + PIECE_BYTES]
            if source.is_cuda and not self._open:
                self._wait()
            queue_copy(target[start : start + part.numel()], part)
            if source.is_cuda:
                self._count(part.numel())

    def chunk_queued(self) -> None:
        """A chunk's copies are queued on the current stream."""
        self._chunk = _end()

    def _wait(self) -> None:
        while len(self._pieces) > (0 if self._chunk_waits() else PIECES_AHEAD - 1):
            self._pieces.popleft().synchronize()

    def _chunk_waits(self) -> bool:
        return self._chunk is not None and not self._chunk.query()  # type: ignore[no-untyped-call]

    def _count(self, nbytes: int) -> None:
        self._open += nbytes
        if self._open >= PIECE_BYTES:
            self._pieces.append(_end())
            self._open = 0


def _end() -> torch.cuda.Event:
    """An event at the current stream's end; a thread that waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
