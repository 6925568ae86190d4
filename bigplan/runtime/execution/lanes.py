"""Lanes: a thread each, and on CUDA a stream each for those that use the device.

An action runs on its lane once everything that it waits for is done. Between lanes with streams the
wait is an event on the device. A lane without a stream (CPU, disk) waits on the host. After the
first error nothing more runs: queued actions fail with the same error. So nothing waits for ever,
and no later collective meets the wrong collective of another rank.

Threads share the interpreter. Copies of one direction share an engine of the GPU. So no lane may
take more of the interpreter or of an engine than it needs:

1. A lane that queued a whole step at its start would keep the interpreter from lanes that others
   wait for. Queues are ACTIONS_AHEAD actions long.
2. The engine goes on with the copies of one stream as long as there are some, and copies of other
   streams wait until all are done. So CHUNKS_AHEAD chunks are queued at a time
   (benchmarks/results/2026-11-22-h200-one-at-a-time).
3. One thread hands a chunk on from lane to lane.
4. Where passes are repeated from CUDA graphs and nothing leaves the GPU, one thread queues passes,
   gathers, reductions and norms in the program's order: a pass takes 0.1 ms then, no longer than a
   gather, and every operator that lets go of the interpreter may wait for the other threads. Qwen3
   0.6B by ZeRO-3 took 0.121 s a step on two H100s with a thread for each lane and 0.092 with one;
   on two others 0.089 either way. Launched by Python, 0.25 to 0.28 s became 0.29 to 0.32: threads
   do launch beside each other (benchmarks/results/2026-11-25-h100-x2-offload).
5. An action that queues nothing, and waits for no other lane, ends with the action before it, so it
   records no event: 0.015 ms of the interpreter in place of 0.05 to 0.07
   (benchmarks/results/2026-11-25-h100-launched).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from bigplan.mechanics import ACTIONS_AHEAD, CHUNKS_AHEAD
from bigplan.program import Action, Lane, Op
from bigplan.timeline import Event, Timeline

# Lanes whose work is queued on the device; the others' is done when their thread returns.
ON_STREAMS = (
    Lane.COMPUTE,
    Lane.GPU_UPDATE,
    Lane.H2D,
    Lane.D2H,
    Lane.STATE_IN,
    Lane.STATE_OUT,
    Lane.COMM,
    Lane.SEND,
    Lane.RECV,
)

SHARED = {Lane.GPU_UPDATE: Lane.STATE_IN, Lane.STATE_OUT: Lane.STATE_IN}  # the thread of another
# The same where no other lane uses the device. What these lanes wait for is then queued by their
# own thread before it, so it never waits on the host for what another lane has yet to queue.
ALONE = {Lane.GPU_UPDATE: Lane.COMPUTE, Lane.COMM: Lane.COMPUTE}


def thread_of(lanes: AbstractSet[Lane], *, captured: bool) -> Mapping[Lane, Lane]:
    """On a GPU, by lane of a program with these lanes: the lane in whose thread it runs.

    `captured`: passes are repeated from CUDA graphs.
    """
    on_device = lanes & set(ON_STREAMS)
    shared = ALONE if captured and on_device <= {Lane.COMPUTE, *ALONE} else SHARED
    return {lane: shared.get(lane, lane) for lane in lanes}


def _closed() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


@dataclass(slots=True, eq=False)
class Done:
    """An action under way: `issued` when its lane has run it, or queued it on its stream.

    The host's times are those of running or queueing; the device's times come from the events. A
    step has up to thousands of these objects. Futures in their place took 25 ms a step; locks take
    4.
    """

    action: Action
    waits: Sequence[Done] = ()  # of other lanes; let go of once the action has run
    issued: bool = False
    started_at: float = 0.0
    ended_at: float = 0.0
    start: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    event: Event | None = None  # its times, once read
    _error: BaseException | None = field(default=None, init=False)
    _gate: threading.Lock = field(default_factory=_closed, init=False)

    def issue(self, error: BaseException | None = None) -> None:
        """The lane has run or queued the action, or `error` says why not."""
        self._error, self.issued = error, True
        self._gate.release()

    def wait(self) -> BaseException | None:
        """Until it is issued; its error, if any."""
        if not self.issued:
            with self._gate:  # and leave it open for others
                pass
        return self._error

    def check(self) -> None:
        """Wait until it is issued; raises its error."""
        if (error := self.wait()) is not None:
            raise error


@dataclass(slots=True)
class LaneClock:
    """Zero of a step, on the host and on the device."""

    host: float
    device: torch.cuda.Event | None = None

    @classmethod
    def now(cls, device: torch.device) -> LaneClock:
        """Start a step; on CUDA everything before it has finished."""
        if device.type != "cuda":
            return cls(time.perf_counter())
        torch.cuda.synchronize(device)
        return cls(time.perf_counter(), _mark(torch.cuda.current_stream(device)))

    def read(self, done: Done, stage: int) -> Event:
        """When an action that has been issued started and ended; waits for the device's end."""
        if done.event is None:
            action = done.action
            what = action.lane.value, action.op.value, action.layer, action.micro_batch
            done.event = Event(stage, *what, *self._span(done))
        return done.event

    def _span(self, done: Done) -> tuple[float, float]:
        if done.start is None or done.end is None or self.device is None:
            # A checkpoint's action may have begun, and ended, before this step did.
            return max(0.0, done.started_at - self.host), max(0.0, done.ended_at - self.host)
        done.end.synchronize()
        start, end = (self.device.elapsed_time(e) / 1e3 for e in (done.start, done.end))
        return start, end


class StoppedError(Exception):
    """The lanes were closed before the action's turn came."""


def _stream(device: torch.device, lane: Lane) -> torch.cuda.Stream:
    """A lane's stream. Kernels of GPU_UPDATE go first, as soon as there is room for a block.

    They take 0.1 ms, and the copy that brings the next chunk waits for them. Behind the products of
    a forward they would wait for tens of milliseconds.
    """
    priority = -1 if lane is Lane.GPU_UPDATE else 0
    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """A timestamp at the stream's current end."""
    # A thread that waits for a blocking event sleeps: spinning, it took a core from the CPU update.
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@dataclass(slots=True)
class Lanes:
    """The lanes of one rank; `run` is what an action does."""

    device: torch.device
    run: Callable[[Action], None]
    captured: bool = False  # passes are repeated from CUDA graphs
    idle: AbstractSet[Op] = frozenset()  # what queues nothing
    pools: dict[Lane, ThreadPoolExecutor] = field(default_factory=dict)
    streams: dict[Lane, torch.cuda.Stream] = field(default_factory=dict)
    failed: BaseException | None = None  # the first error; nothing runs after it

    def start(self, actions: Iterable[Done]) -> None:
        """Queue actions, each behind its lane and what it waits for, which is queued before it.

        A lane gets its actions at once: to hand over thousands one by one takes the interpreter
        from lanes that have begun.
        """
        queues: dict[Lane, list[Done]] = {}
        actions = list(actions)
        lanes = {done.action.lane for done in actions}
        threads: Mapping[Lane, Lane] = {}
        if self.device.type == "cuda":
            threads = thread_of(lanes, captured=self.captured)
            for lane in sorted(lanes & set(ON_STREAMS) - self.streams.keys()):
                self.streams[lane] = _stream(self.device, lane)
        for done in actions:
            lane = done.action.lane
            queues.setdefault(threads.get(lane, lane), []).append(done)
        for thread, queue in queues.items():
            if thread not in self.pools:
                self.pools[thread] = ThreadPoolExecutor(1, thread_name_prefix=thread.name)
            self.pools[thread].submit(self._play, queue)

    def _play(self, queue: list[Done]) -> None:
        recent: dict[Lane, deque[Done]] = {}
        for done in queue:
            lane = done.action.lane
            ahead = CHUNKS_AHEAD if lane is Lane.STATE_IN else ACTIONS_AHEAD
            before = recent.setdefault(lane, deque(maxlen=ahead))
            earlier = before[0] if len(before) == before.maxlen else None
            if before and done.action.op in self.idle and not done.waits:
                done.start = done.end = before[-1].end
            before.append(done)
            self._execute(done, None if done.end else self.streams.get(lane), earlier)

    def _execute(self, done: Done, stream: torch.cuda.Stream | None, earlier: Done | None) -> None:
        """Run an action, or queue it once the device has done `earlier`, if any."""
        try:
            with torch.cuda.stream(stream) if stream else nullcontext():
                for other in done.waits:
                    other.check()
                    if other.end is not None:
                        if stream is None:
                            other.end.synchronize()
                        else:
                            stream.wait_event(other.end)
                if earlier is not None and earlier.end is not None:
                    earlier.end.synchronize()
                if self.failed is not None:
                    raise self.failed
                self._timed(done, stream)
            done.issue()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits, and so to the step
            self.failed = self.failed or error
            done.issue(error)
        finally:
            done.waits = ()

    def _timed(self, done: Done, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            done.start = _mark(stream)
        done.started_at = time.perf_counter()
        self.run(done.action)
        done.ended_at = time.perf_counter()
        if stream is not None:
            done.end = _mark(stream)

    def close(self) -> None:
        """Let the actions that are running end, drop those queued, join the threads."""
        # Not by cancelling them in their pool: an action on another lane may wait for one of them.
        self.failed = self.failed or StoppedError()
        for pool in self.pools.values():
            pool.shutdown()


def last_of_lanes(actions: Iterable[Done]) -> Iterable[Done]:
    """The last action of every lane: once it has run, all have."""
    return {done.action.lane: done for done in actions}.values()


def read_ahead(actions: Sequence[Done], clock: LaneClock, stage: int) -> None:
    """Wait for a step's actions, and read their times while the device is still at the last ones.

    To read all of them at the end takes milliseconds in which the device has nothing to do. To read
    them before everything is queued takes the interpreter from the threads that queue.
    """
    for done in last_of_lanes(done for done in actions if done.action.lane in ON_STREAMS):
        done.wait()
    for done in actions:
        if done.wait() is None:
            clock.read(done, stage)


def finish(actions: list[Done], clock: LaneClock, stage: int) -> Timeline:
    """Wait for a step's actions; raises the first error once none of them runs any more."""
    for done in last_of_lanes(actions):
        done.wait()
    for done in actions:
        done.check()
    events = tuple(clock.read(done, stage) for done in actions)
    return Timeline(events, max((event.end for event in events), default=0.0))
