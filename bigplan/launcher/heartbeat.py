"""Which ranks are alive and make progress: each is asked beside its other calls, in another thread.

A frozen process does not answer. A process may also wait for ever, for example in a collective
whose other side never comes. It answers, but ends no action.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bigplan.errors import LostError
from bigplan.launcher.actor import Beat

GROUP = "heartbeat"  # Ray's concurrency group of it
EVERY = 1.0  # seconds between two questions to a rank
SILENT = 45.0  # seconds without an answer: Python stops everything for a second or so at most
STEPS = 5.0  # predicted steps without the end of an action; predictions err less
PATIENT = 10  # times as long while kernels are compiled and memory is touched


@dataclass(frozen=True)
class Allowed:
    """Seconds without an answer, and without anything done (None: whatever it takes)."""

    silent: float
    still: float | None = None

    @classmethod
    def in_step(cls, predicted: float, *, first: bool) -> Allowed:
        """While a step runs that should take so many seconds."""
        times = PATIENT if first else 1
        longer = SILENT + 5 * EVERY  # so that a silent rank is known before those that wait for it
        return cls(times * SILENT, times * max(longer, STEPS * predicted))

    @classmethod
    def checking(cls) -> Allowed:
        """While nothing is allocated or compiled, so nothing holds Python up for long."""
        return cls(SILENT)

    @classmethod
    def elsewhere(cls) -> Allowed:
        """In all other calls, which do not report their progress."""
        return cls(PATIENT * SILENT)


@dataclass
class _RankPulse:
    """What is known of one rank."""

    question: Any  # under way; None: answered
    asked: float
    beat: Beat | None = None
    moved: float = 0.0  # when its last beat was unlike the one before


@dataclass
class Heartbeat:
    """The beats of all ranks, as long as a call to them runs."""

    actors: Sequence[Any]
    clock: Callable[[], float] = time.monotonic
    _ranks: list[_RankPulse] = field(default_factory=list)

    def begin(self) -> None:
        """A call begins: nobody has stood still yet. All are asked once at their first."""
        now = self.clock()
        if not self._ranks:
            self._ranks = [_RankPulse(self._ask(actor), now) for actor in self.actors]
        for rank in self._ranks:
            rank.moved = now

    def look(self, allowed: Allowed, doing: str) -> None:
        """Ask who is due, and hear who has answered.

        Raises LostError if a rank was silent, or stood still, for longer than it may. A silent rank
        is ended here, because Ray does not end a frozen process.
        """
        now = self.clock()
        for rank in self._ranks:
            self._hear(rank, now)
        # A silent rank is the reason why the others stand still.
        for number, rank in enumerate(self._ranks):
            silent = now - rank.asked
            # A rank that never answered may still be importing, beside many others on slow disks.
            most = allowed.silent if rank.beat is not None else PATIENT * SILENT
            if rank.question is not None and silent > most:
                _end(rank.beat)
                raise LostError(_told(number, rank, "gave no sign of life", silent, doing))
        for number, rank in enumerate(self._ranks):
            still = now - rank.moved
            if allowed.still is not None and still > allowed.still:
                raise LostError(_told(number, rank, "got nothing done", still, doing))
        for rank, actor in zip(self._ranks, self.actors, strict=True):
            if rank.question is None and now - rank.asked >= EVERY:
                rank.question, rank.asked = self._ask(actor), now

    def quiet(self, seconds: float) -> tuple[int, ...]:
        """The ranks that owe an answer for so long."""
        now = self.clock()
        return tuple(
            number
            for number, rank in enumerate(self._ranks)
            if rank.question is not None and now - rank.asked > seconds
        )

    def _ask(self, actor: Any) -> Any:
        return actor.beat.options(concurrency_group=GROUP).remote()

    def _hear(self, rank: _RankPulse, now: float) -> None:
        import ray

        if rank.question is None or not ray.wait([rank.question], timeout=0)[0]:
            return
        question, rank.question = rank.question, None
        try:
            beat: Beat = ray.get(question)
        except ray.exceptions.RayError:
            rank.moved = now  # its own call tells why, if it is lost
            return
        if rank.beat is None or beat.ended != rank.beat.ended:
            rank.moved = now
        rank.beat = beat


def _told(number: int, rank: _RankPulse, what: str, seconds: float, doing: str) -> str:
    where = under_way = ""
    if rank.beat is not None:
        where = f" (process {rank.beat.process} on node {rank.beat.node[:8]})"
        under_way = f", last at {', '.join(rank.beat.doing)}" if rank.beat.doing else ""
    return f"rank {number}{where} {what} for {seconds:.0f} s while {doing}{under_way}"


def _end(beat: Beat | None) -> None:
    """Kill the process, on whatever node it is."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if beat is None:
        return
    there = NodeAffinitySchedulingStrategy(beat.node, soft=False)
    kill = ray.remote(_kill).options(num_cpus=0, scheduling_strategy=there)
    ray.wait([kill.remote(beat.process)], timeout=EVERY * PATIENT)


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return
