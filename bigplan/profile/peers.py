"""Processes of this machine, one per device, that do the same at the same time.

The processes meet as a run's ranks do: over a file that only this user may read, by NCCL between
GPUs and by gloo between CPU devices, on loopback alone. They are told to call a module's function,
which gets the `Peer` of its process as first argument.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, Self, TypeVar

import torch
import torch.distributed as dist

from bigplan.errors import WorkerError

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT = timedelta(seconds=60)  # of a collective whose other side is gone
START_SECONDS = 120.0  # for a process to import torch and meet the others, on a busy machine
END_SECONDS = 5.0  # for a process to end by itself
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(slots=True)
class Peer:
    """One of the processes, as seen by the functions that it is told to call."""

    rank: int
    world: int
    device: torch.device
    threads: int
    groups: dict[int, dist.ProcessGroup] = field(default_factory=dict)  # by size, from rank 0 on
    company: Company | None = None

    def wait(self) -> None:
        """Wait until the device has done its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Company:
    """Work that a thread does over and over beside everything else; `runs` counts it."""

    def __init__(self, work: Callable[[], object], threads: int) -> None:
        self.runs = 0
        self._work, self._threads = work, threads
        self._stop, self._ended = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # by default a new thread's products take all cores
        while not self._stop.is_set():
            self._work()
            with self._ended:
                self.runs += 1
                self._ended.notify_all()

    def beyond(self, runs: int) -> int:
        """How many have ended, once these are more than `runs`."""
        with self._ended:
            self._ended.wait_for(lambda: self.runs > runs)
            return self.runs

    def stop(self) -> None:
        """Stop once the run under way has ended."""
        self._stop.set()
        self._thread.join()


class Together(Protocol):
    """Processes that do the same at the same time: `Peers`, or actors on several nodes."""

    def __len__(self) -> int:
        """Number of processes."""

    def call(
        self, work: Callable[Concatenate[Peer, P], T], *args: P.args, **named: P.kwargs
    ) -> list[T]:
        """What `work` returns in each process, by rank. Raises WorkerError."""


class _PeerReply(NamedTuple):
    result: Any
    error: str = ""


class Peers:
    """Starts a process for each device, and ends all. Raises WorkerError where one fails."""

    def __init__(self, devices: Sequence[torch.device], threads: int) -> None:
        self._folder = TemporaryDirectory(prefix="bigplan-profile-")  # nobody else may enter
        self._ends: list[Connection] = []
        self._processes = []
        # A process that has used CUDA cannot be forked. Peers fork from a server, which imports
        # torch once for all of them: an import takes 3 s of a core.
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        meeting = Path(self._folder.name) / "addresses"
        for rank, device in enumerate(devices):
            ours, theirs = context.Pipe()
            given = rank, len(devices), str(device), threads
            process = context.Process(target=_serve, args=(theirs, meeting, *given), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._ends)

    def call(
        self, work: Callable[Concatenate[Peer, P], T], *args: P.args, **named: P.kwargs
    ) -> list[T]:
        """What `work` returns in each process, in the order of their devices.

        Raises WorkerError as soon as one of them fails: the others may wait for it.
        """
        return self.call_some(range(len(self)), work, *args, **named)

    def call_some(
        self,
        ranks: Sequence[int],
        work: Callable[Concatenate[Peer, P], T],
        *args: P.args,
        **named: P.kwargs,
    ) -> list[T]:
        """Like `call`, in the processes of `ranks` alone."""
        waiting = {self._ends[rank]: rank for rank in ranks}
        results: dict[int, T] = {}
        try:
            for end in waiting:
                end.send((work, args, named))
            while waiting:
                ready = connection.wait(list(waiting), START_SECONDS)
                if not ready:
                    raise WorkerError(
                        f"no answer for {START_SECONDS:.0f} s: {sorted(waiting.values())}"
                    )
                for end in [end for end in waiting if end in ready]:
                    answer: _PeerReply = end.recv()
                    if answer.error:
                        raise WorkerError(answer.error)
                    results[waiting.pop(end)] = answer.result
        except (EOFError, OSError) as error:
            raise WorkerError("a process that measures collectives ended early") from error
        return [results[rank] for rank in ranks]

    def close(self) -> None:
        """End all processes, also those that wait for another."""
        for end in self._ends:
            end.close()  # a process that waits for orders ends now
        for process in self._processes:
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(
    orders: Connection, meeting: Path, rank: int, world: int, device: str, threads: int
) -> None:
    """The life of a process: meet the others, then do as told until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    warnings.simplefilter("ignore")
    try:
        peer = _meet(meeting, rank, world, torch.device(device), threads)
        while True:
            work, args, named = orders.recv()
            orders.send(_PeerReply(work(peer, *args, **named)))
    except (EOFError, BrokenPipeError):
        pass  # nobody gives orders any more
    except Exception as error:  # noqa: BLE001 - told to whoever gives the orders
        orders.send(_PeerReply(None, f"process {rank} of {world}: {error}"))
    os._exit(0)  # a communicator whose other side is gone may not end by itself


def _meet(meeting: Path, rank: int, world: int, device: torch.device, threads: int) -> Peer:
    """Join the others: see runtime/worker.py, `_joined`."""
    os.environ.update(LOOPBACK)
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(meeting), world)  # type: ignore[attr-defined]
    store.set_timeout(TIMEOUT)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    return Peer(rank, world, device, threads)
