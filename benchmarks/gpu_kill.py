"""kill -9 of the worker of a launch on a GPU: seconds until it trains again.

    python -m benchmarks.gpu_kill OUT [--cluster FILE] [--model NAME] [--cap TIER=SIZE] ...

Launches a model (llama-like-5.5b with 24 GiB of an H200), kills its worker in the third step, and
prints what the run's record says: seconds from the loss to the next step's begin. A checkpoint of
5.5B has 66 GB, more than a rented machine's drive may have room for, so none is written and the run
begins again at its first step. Measured is all else: noticing, a new process, page-locked memory,
kernels and the first values. Further options are those of `bigplan launch`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


def main() -> None:
    """Read the command line, launch, kill, tell."""
    out, given = Path(sys.argv[1]), sys.argv[2:]
    options = GIVEN | dict(zip(given[::2], given[1::2], strict=True))
    command = [
        sys.executable,
        "-c",
        COMMAND,
        "launch",
        *(word for pair in options.items() for word in pair),
    ]
    command += ["--steps", str(BEFORE + AFTER), "--checkpoint-keep", "0", "--run-dir", str(out)]
    out.mkdir(parents=True, exist_ok=True)
    with (out / "launch.txt").open("wb") as log:
        launch = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        begun = time.monotonic()
        while (run := started(out)) is None or len(read_metrics(run)) < BEFORE:
            if launch.poll() is not None:
                sys.exit(f"the launch ended with {launch.returncode}: see {log.name}")
            time.sleep(0.1)
        print(f"{BEFORE} steps {time.monotonic() - begun:.1f} s after the command", flush=True)
        (worker,) = workers(run)
        os.kill(worker, signal.SIGKILL)
        print(f"killed; the launch ended with {launch.wait()}")
    record = read_record(run)
    for restart in record.summary.restarts:
        print(f"{restart.reason}: after {restart.done} steps, from step {restart.back_to} again, "
              f"{restart.seconds:.1f} s from the loss to the next step's begin")  # fmt: skip
    took = ", ".join(f"{metric.seconds:.2f}" for metric in record.metrics)
    print(f"steps on record: {took} s")


if __name__ == "__main__":
    main()
