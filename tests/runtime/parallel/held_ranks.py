"""Two processes that have met and wait to be told to train; run by test_strangers.py."""

import time
from pathlib import Path

import torch

from bigplan.launcher.preflight import LOOPBACK, listen_on
from tests.runtime.harness import started
from tests.runtime.parallel.two_ranks import cases

NAME = "same-one-unit"


def run_rank(rank: int, folder: str) -> None:
    """Meet, tell so, wait for the file `go`, train one step and leave its loss."""
    torch.set_num_threads(1)
    listen_on(LOOPBACK)  # as the launcher does for ranks of one machine
    path, plan = Path(folder), cases()[NAME]
    with started(plan, rank=rank, meeting=path / "meeting") as worker:
        (path / f"met.{rank}").touch()
        while not (path / "go").exists():
            time.sleep(0.01)
        (path / f"loss.{rank}").write_text(repr(worker.step().loss))
