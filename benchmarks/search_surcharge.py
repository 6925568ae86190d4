"""What plans a surcharge on moves gives, and the CPU time of their searches.

Usage: python -m benchmarks.search_surcharge SHARE OUT.jsonl [SECONDS]    (whole: an hour)

SHARE takes the place of `thresholds.EXPOSED`. Shipped models on shipped clusters of one to eight
GPUs, in an order drawn with a fixed seed, so that runs that end early can be compared. A line per
case has its name, the step's seconds (null: nothing fits), whether drives are written, and CPU
seconds.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from bigplan.solve import thresholds

MODELS = (
    *("llama-3-8b", "qwen2.5-7b", "qwen3-4b", "qwen3-14b", "llama-2-13b", "phi-4", "opt-30b"),
    *("qwen3-32b", "llama-3-70b", "mistral-7b", "opt-13b", "opt-66b", "starcoder2-7b"),
    "qwen2.5-72b",
)
CLUSTERS = (
    *("rtx-4090-workstation", "rtx-4090x2-workstation", "rtx-3090x4-workstation"),
    *("rtx-5090-workstation", "rtx-a6000x4-workstation", "l40s-8x", "dgx-a100-40g", "h200-1x"),
    *("dgx-h100", "rtx-pro-6000x8-server", "a10g-cloud", "gh200-4x", "hgx-h200", "l4-cloud"),
)
STEPS = ((64, 4096), (512, 2048), (16, 8192), (128, 2048), (256, 4096))  # sequences, their tokens


Case = tuple[str, str, tuple[int, int]]  # model, cluster, a step


def cases() -> list[Case]:
    """All cases, in an order drawn with a fixed seed."""
    found = list(product(MODELS, CLUSTERS, STEPS))
    Random(7).shuffle(found)
    return found


def searched(case: Case, **more: Any) -> tuple[float | None, bool]:
    """Seconds of the case's step, None where nothing fits, and whether drives are written."""
    import bigplan  # not before a share is set
    from bigplan.wear import wear_of

    model, cluster, (batch, length) = case
    training = {"sequence_length": length, "global_batch": batch}
    try:
        plan = bigplan.plan(
            model=model, cluster=cluster, training=training, engine="native", **more
        )
    except (bigplan.errors.InfeasibleError, bigplan.errors.InputError):
        return None, False
    return plan.predicted.step_seconds, wear_of(plan) is not None


def main() -> None:
    """Write a line per case until time ends."""
    thresholds.EXPOSED = float(sys.argv[1])
    began = time.monotonic()
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else float("inf")
    with Path(sys.argv[2]).open("w") as lines:
        for case in cases():
            if time.monotonic() - began > seconds:
                break
            start = time.process_time()
            step, drives = searched(case)
            model, cluster, (batch, length) = case
            row = [f"{model} {cluster} {batch} x {length}", step, drives]
            print(json.dumps([*row, round(time.process_time() - start, 2)]), file=lines, flush=True)


if __name__ == "__main__":
    main()
