"""The cores of the host on one job, each at its own pace.

torch splits an operator into as many equal parts as it has threads, and waits for the last. While
copies run and other lanes queue kernels, some core is always late, so the others wait for it. Here
threads take small parts as they come, so they end within a part of each other. AdamW with its
16-bit copy, beside copies both ways and a busily waiting thread, reached 2.47 G parameters/s in
parts of 2^21, and 2.03 by torch's threads; alone 2.81 and 2.64 (an H200's machine of 16 cores,
benchmarks/results/2026-11-21-h200-limit, adam-second.txt).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from fractions import Fraction
from math import ceil
from threading import Barrier

import torch

from bigplan.mechanics import NICE


class Cores:
    """As many threads as torch would use, or a part of them; torch has one core in each."""

    def __init__(self, part: Fraction = Fraction(1)) -> None:
        usual = torch.get_num_threads()
        self.count = count = ceil(part * usual)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="core")
        met = Barrier(count)

        def begin() -> None:
            torch.get_num_threads()  # a thread's first question sets it to what is set by then
            torch.set_num_threads(1)
            if sys.platform == "linux":  # where a thread has a priority of its own
                with suppress(OSError):  # a sandbox may forbid it
                    os.nice(NICE)
            met.wait()  # so that every thread begins once

        wait([self._pool.submit(begin) for _ in range(count)])
        torch.set_num_threads(usual)  # what later threads start with

    def run(self, jobs: Iterable[Callable[[], None]]) -> None:
        """Run all; raises the first error once none of them runs any more."""
        started = [self._pool.submit(job) for job in jobs]
        wait(started)
        for job in started:
            job.result()

    def close(self) -> None:
        """Join the threads."""
        self._pool.shutdown()

    def __enter__(self) -> Cores:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
