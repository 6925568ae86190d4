"""What plans gain by their drives.

Usage: python -m benchmarks.search_drives [SECONDS] > drives.txt    (whole: more than an hour)

The cases of `search_surcharge`. Where a plan writes to drives, the case is planned once more
without them. A line has the step's seconds, and by how much it is longer without drives. The
simplest plan of those within a hundredth is wanted, so it should be longer by more than that.
"""

from __future__ import annotations

import sys
import time

from benchmarks.search_surcharge import cases, searched


def main() -> None:
    """A line per plan that writes to drives, until time ends; then how many plans there were."""
    began = time.monotonic()
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else float("inf")
    plans = 0
    for case in cases():
        if time.monotonic() - began > seconds:
            break
        step, drives = searched(case)
        plans += step is not None
        if step is None or not drives:
            continue
        without, _ = searched(case, caps={"nvme": 0})
        told = "fits with drives alone" if without is None else f"{without / step - 1:+.2%}"
        model, cluster, (batch, length) = case
        print(f"{model:14s} {cluster:24s} {batch:4d} x {length}: {step:9.4g} s, {told}", flush=True)
    print(f"{plans} plans")


if __name__ == "__main__":
    main()
