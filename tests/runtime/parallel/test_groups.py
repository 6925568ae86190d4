"""Ends of channels that meet before a message passes."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from bigplan.content import Holds
from bigplan.ranks import Channel
from bigplan.runtime.parallel.groups import meet, store_of
from tests.runtime.processes import start

MESSAGES = 20
# Two virtual stages on each of two ranks have channels of each kind both ways.
CHANNELS = [
    Channel(kind, *ends)
    for kind in (Holds.HIDDEN, Holds.HIDDEN_GRADIENT)
    for ends in ((0, 1), (1, 0))
]


def _run(rank: int, folder: str) -> None:
    """Leave, for each channel and message, when this rank came and when it went on."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=store_of(Path(folder) / "meeting", 2), rank=rank, world_size=2
    )

    def pass_messages(number: int) -> None:
        waits, lines = random.Random(10 * rank + number), list[str]()
        for _ in range(MESSAGES):
            time.sleep(0.01 * waits.random())
            came = time.monotonic()
            meet(CHANNELS[number], rank, None)
            lines.append(f"{came!r} {time.monotonic()!r}\n")
        (Path(folder) / f"{number}.{rank}").write_text("".join(lines))

    threads = [threading.Thread(target=pass_messages, args=(n,)) for n in range(len(CHANNELS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.destroy_process_group()


def test_nobody_goes_on_before_both_have_come(tmp_path: Path) -> None:
    """On four channels at once, between two processes that have one clock."""
    start(_run, tmp_path, 2)
    for number in range(len(CHANNELS)):
        first, second = (
            [tuple(map(float, line.split())) for line in (tmp_path / f"{number}.{rank}").open()]
            for rank in (0, 1)
        )
        assert len(first) == len(second) == MESSAGES
        for (came, went), (other_came, other_went) in zip(first, second, strict=True):
            assert min(went, other_went) >= max(came, other_came)
