"""A run that kills itself, or is killed, and is started again until it has ended.

It leaves every step's loss in `losses`, where it was when it killed itself in `kills`, and when it
ends a digest of its weights in `digest`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from bigplan.mechanics import PAGE
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.runtime.checkpoint.folder import checkpoints
from bigplan.runtime.worker import NativeWorker
from tests.runtime.checkpoints import away, on_device, resident

STEPS, EVERY = 6, 2
# Where a process can kill itself: a call, and the part of a path that it is about.
PLACES = {
    "a file of a checkpoint": ("pwritev", ".partial"),
    "reserving its space": ("posix_fallocate", ".partial"),
    "making it last": ("fsync", ".partial"),
    "its name": ("rename", ".partial"),
    "an NVMe write": ("pwritev", ".bin"),
    "an NVMe read": ("preadv", ".bin"),
    "reading a checkpoint": ("preadv", ".safetensors"),
}


class Kill(NamedTuple):
    """At the `number`-th such call: half of it is done, and then the process is gone."""

    place: str
    number: int


def plan_of(name: str, device: str = "cpu") -> Plan:
    """Plans of one training: `nvme` moves state in several chunks, `gpu` moves nothing."""
    makers: dict[str, Callable[..., Plan]] = {
        "nvme": partial(away, Tier.NVME, chunk=5_000),
        "host": away,
        "gpu": resident,
    }
    return on_device(makers[name](deterministic=device == "cuda"), device)


def train(folder: Path, name: str, kill: Kill | None, device: str = "cpu") -> None:
    """Go on from the newest checkpoint to the end."""
    torch.set_num_threads(1)
    with _killed(folder, kill):
        scratch = folder / "scratch"
        worker = NativeWorker(plan_of(name, device), 0, scratch)
        worker.preflight()
        saved = folder / "checkpoints"
        done = worker.start(Path(), saved if checkpoints(saved) else None)
        for step in range(done + 1, STEPS + 1):
            result = worker.step(saved if step % EVERY == 0 else None)
            assert not any(one.error for one in result.saved), result.saved
            _append(folder / "losses", [step, result.loss])
        worker.save(saved)
        (folder / "digest").write_text(worker.finish().digest)
        worker.close()


def _append(path: Path, line: object) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


@contextmanager
def _killed(folder: Path, kill: Kill | None) -> Iterator[None]:
    if kill is None:
        yield
        return
    call, part = PLACES[kill.place]
    real: Callable[..., Any] = getattr(os, call)
    left = kill.number

    def counted(first: Any, *rest: Any, **named: Any) -> Any:
        nonlocal left
        path = (
            str(Path(f"/proc/self/fd/{first}").readlink()) if isinstance(first, int) else str(first)
        )
        if part in path:
            left -= 1
            if left == 0:
                if call == "pwritev":
                    views, at = rest
                    half = len(views[0]) // 2 // PAGE * PAGE
                    real(first, [memoryview(views[0])[:half]], at)
                _append(folder / "kills", kill.place)
                os.kill(os.getpid(), signal.SIGKILL)
        return real(first, *rest, **named)

    with mock.patch(f"os.{call}", counted):
        yield
