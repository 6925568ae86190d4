"""A case's plan again and again, with other numbers of threads for the CPU's update.

    python -m benchmarks.update_threads FROM OUT CASE THREADS...

FROM is a folder of `benchmarks.limit` with the case's plan and promise; OUT gets a record and a
trace for each number, CASE-N-threads. Each runs in a process of its own, as the case did. The
runtime takes CORES_BESIDE_COPIES of the cores (mechanics.py). Needs the case's GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

from benchmarks import limit


def one(origin: Path, out: Path, case: str, threads: int) -> None:
    """Run the case's plan here with so many threads."""
    from bigplan.runtime import update

    name = f"{case}-{threads}-threads"
    shutil.copy(origin / f"{case}.plan.yaml", out / f"{name}.plan.yaml")
    limit.note(out, name, limit.promises(origin)[case])
    update.CORES_BESIDE_COPIES = Fraction(threads, os.cpu_count() or 1)
    print(f"{threads} threads", flush=True)
    limit.run_plan(out, name)


def main(origin: str, out: str, case: str, *numbers: str) -> None:
    """Each number in a process of its own."""
    if len(numbers) == 1:
        one(Path(origin), Path(out), case, int(numbers[0]))
        return
    Path(out).mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    environment.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    for number in numbers:
        command = [sys.executable, "-m", "benchmarks.update_threads", origin, out, case, number]
        subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
