"""Ranks as processes that have torch imported when they start: they fork from one server.

To import torch and the package takes a process 3 s of a core, and the tests of ranks start about
forty.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Literal, overload

from torch.multiprocessing.spawn import ProcessContext, start_processes

from bigplan.collector import collected_rarely

ROOT = Path(__file__).parents[2]
PRELOADED = [
    *(
        f"tests.runtime.{name}"
        for name in (
            "parallel.sharded_ranks",
            "parallel.two_ranks",
            "checkpoint.ranks",
            "parallel.held_ranks",
            "checkpoint.killed",
            "linear.lora_ranks",
            "linear.eight_bits_ranks",
            "optimizer.moments_ranks",
            "experts.courses",
            "cpu.compiling",
        )
    ),
    "torch.fx.experimental.symbolic_shapes",  # of the first backward: sympy, 0.6 s
]


@cache
def server() -> ForkServerContext:
    """The server of this process, started. It imports what it finds from its own folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        ensure_running()
    finally:
        os.chdir(before)
    return context


@overload
def start(
    run: Callable[[int, str], None], folder: object, ranks: int, *, join: Literal[True] = True
) -> None: ...
@overload
def start(
    run: Callable[[int, str], None], folder: object, ranks: int, *, join: Literal[False]
) -> ProcessContext: ...
def start(
    run: Callable[[int, str], None], folder: object, ranks: int, *, join: bool = True
) -> ProcessContext | None:
    """`run(rank, folder)` in a process for each rank; what fails in one is raised here.

    None outlives this process, as where a test's time is over.
    """
    server()
    arguments = (run, str(folder))
    started: ProcessContext | None = start_processes(  # type: ignore[no-untyped-call]
        _begin, arguments, ranks, join, daemon=True, start_method="forkserver"
    )
    return started


def _begin(rank: int, run: Callable[[int, str], None], folder: str) -> None:
    """The collector of cycles leaves the server's pages alone: to look at them copies them.

    Of a rank's time a tenth was the collector's.
    """
    gc.freeze()
    with collected_rarely():
        run(rank, folder)
