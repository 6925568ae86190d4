"""kill -9 of a worker of a launch on GPUs, or of the launch: seconds until it trains again.

    python -m benchmarks.gpu_kill worker|launch OUT [--cluster FILE] [--model NAME] ...

Launches a model (llama-like-5.5b with 24 GiB of an H200) and kills in the third step. A worker is
replaced by the launch itself, and its run's record says how many seconds passed from the loss to
the next step's begin. A killed launch is resumed by a second one; told are the seconds from the
kill to the end of the first step that this one does. A checkpoint of 5.5B has 66 GB, more than a
rented machine's drive may have room for, so none is written and the run begins again at its first
step. Measured is all else: noticing, new processes, page-locked memory, kernels and the first
values. Further options are those of `bigplan launch`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from bigplan.launcher.record import read_metrics, read_record
from tests.launcher.soak import COMMAND, workers

BEFORE, AFTER = 2, 2  # steps
GIVEN = {
    "--model": "llama-like-5.5b", "--cluster": "h200-1x", "--cap": "gpu=24 GiB",
    "--seq-len": "4096", "--global-batch": "16", "--engine": "native",
}  # fmt: skip


def started(out: Path) -> Path | None:
    """The run's folder, once it is there."""
    return next((plan.parent for plan in out.glob("*/plan.yaml")), None)


def launched(out: Path, options: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """`bigplan launch` with these options, writing to OUT/launch.txt."""
    command = [sys.executable, "-c", COMMAND, "launch"]
    command += [word for pair in options.items() for word in pair]
    command += ["--steps", str(BEFORE + AFTER), "--checkpoint-keep", "0"]
    with (out / "launch.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def wait_for(steps: int, out: Path, launch: subprocess.Popen[bytes]) -> Path:
    """The run's folder, once so many steps are on record."""
    while (run := started(out)) is None or len(read_metrics(run)) < steps:
        if launch.poll() is not None:
            sys.exit(f"the launch ended with {launch.returncode}: see {out / 'launch.txt'}")
        time.sleep(0.1)
    return run


def kill_worker(run: Path, launch: subprocess.Popen[bytes]) -> None:
    """Kill one rank's process and let the launch go on."""
    worker, *others = workers(run)
    os.kill(worker, signal.SIGKILL)
    print(f"killed a worker of {1 + len(others)}; the launch ended with {launch.wait()}")
    record = read_record(run)
    for restart in record.summary.restarts:
        print(f"{restart.reason}: after {restart.done} steps, from step {restart.back_to} again, "
              f"{restart.seconds:.1f} s from the loss to the next step's begin")  # fmt: skip


def kill_launch(run: Path, launch: subprocess.Popen[bytes]) -> None:
    """Kill the launch, and let a second one go on with its run."""
    launch.kill()
    begun, killed = time.monotonic(), launch.wait()
    print(f"killed the launch ({killed})", flush=True)
    again = launched(run.parent, {"--resume": str(run)})
    while len(read_metrics(run)) >= BEFORE and again.poll() is None:
        time.sleep(0.1)  # what no checkpoint has is taken off the record
    wait_for(1, run.parent, again)
    print(f"the first step again {time.monotonic() - begun:.1f} s after the kill")
    print(f"the second launch ended with {again.wait()}")


def main() -> None:
    """Read the command line, launch, kill, tell."""
    whom, out, given = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    kill = {"worker": kill_worker, "launch": kill_launch}[whom]
    options = GIVEN | dict(zip(given[::2], given[1::2], strict=True))
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    launch = launched(out, options | {"--run-dir": str(out)})
    run = wait_for(BEFORE, out, launch)
    print(f"{BEFORE} steps {time.monotonic() - begun:.1f} s after the command", flush=True)
    kill(run, launch)
    took = ", ".join(f"{metric.seconds:.2f}" for metric in read_record(run).metrics)
    print(f"steps on record: {took} s")


if __name__ == "__main__":
    main()
