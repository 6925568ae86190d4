"""Times `bigplan plan` as a whole process, from a cold start, and prints what the search did.

Usage: python benchmarks/search_curve.py    (two minutes on two cores)

First the cases that the project sets itself a limit for, each started STARTS times: the median and
the slowest, as other users of a machine cost up to a third. Then one model from 8 to 16,384 GPUs.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

CASES = (
    ("llama-3-8b", "rtx-4090-workstation", 1),
    ("llama-3-70b", "rtx-4090-workstation", 1),
    ("gpt3-175b", "dgx-a100-80g", 8),
    ("gpt3-175b", "dgx-a100-80g", 64),
    ("megatron-1t", "dgx-h100", 1280),
)
STARTS = 15
CURVE = [("gpt3-175b", "dgx-a100-80g", 2**power) for power in range(12)]
COMMAND = [sys.executable, "-c", "from bigplan.cli import main; main()", "plan", "--json"]


@dataclass(frozen=True, slots=True)
class Run:
    """One process: its answer, and what it took."""

    plan: dict[str, object]
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int


def run(model: str, cluster: str, nodes: int) -> Run:
    """Plan in a process of its own. Raises CalledProcessError."""
    options = ["--model", model, "--cluster", cluster, "--nodes", str(nodes)]
    start = time.perf_counter()
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return Run(
        plan=json.loads(output),
        wall_seconds=time.perf_counter() - start,
        cpu_seconds=used.ru_utime + used.ru_stime,
        peak_bytes=used.ru_maxrss * 1024,  # Linux counts KiB
    )


def line(case: tuple[str, str, int], starts: int) -> str:
    """A case with everything worth knowing about its search."""
    model, cluster, nodes = case
    every = [run(*case) for _ in range(starts)]
    walls = [done.wall_seconds for done in every]
    done = every[-1]
    plan = done.plan
    search = plan["search"]
    assert isinstance(search, dict)
    return (
        f"{model:12} {cluster:20} {nodes:5} {search['strategies']:6} {search['relaxations']:5} "
        f"{search['programs']:4} {statistics.median(walls):6.2f} {max(walls):5.2f} "
        f"{done.cpu_seconds:6.2f} "
        f"{done.peak_bytes / 1e6:5.0f} {plan['step_seconds']:10.4g} {plan['model_gap']:7.4f} "
        f"{plan['simulated_gap']:7.4f}"
    )


def main() -> None:
    """A line per case."""
    print(f"python {platform.python_version()}, {os.cpu_count()} cores")
    print(
        "model        cluster              nodes strat.   LPs MILP wall s worst  CPU s  RSS MB  "
        "step s  model gap  simulated gap"
    )
    for case in CASES:
        print(line(case, STARTS), flush=True)
    for case in CURVE:
        print(line(case, 1), flush=True)


if __name__ == "__main__":
    main()
