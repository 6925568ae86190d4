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

from bigplan.solve import thresholds

MODELS = (
    *("llama-3-8b", "qwen2.5-7b", "qwen3-4b", "qwen3-14b", "llama-2-13b", "phi-4", "opt-30b"),
    *(
        "qwen3-32b",
        "llama-3-70b",
        "mistral-7b",
        "opt-13b",
        "opt-66b",
        "starcoder2-7b",
        "qwen2.5-72b",
    ),
)
CLUSTERS = (
    *("rtx-4090-workstation", "rtx-4090x2-workstation", "rtx-3090x4-workstation"),
    *("rtx-5090-workstation", "rtx-a6000x4-workstation", "l40s-8x", "dgx-a100-40g", "h200-1x"),
    *("dgx-h100", "rtx-pro-6000x8-server", "a10g-cloud", "gh200-4x", "hgx-h200", "l4-cloud"),
)
STEPS = ((64, 4096), (512, 2048), (16, 8192), (128, 2048), (256, 4096))  # sequences, their tokens


def main() -> None:
    """Write a line per case until time ends."""
    share, out = float(sys.argv[1]), Path(sys.argv[2])
    thresholds.EXPOSED = share
    import bigplan  # reads the share
    from bigplan.wear import wear_of

    began = time.monotonic()
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else float("inf")
    cases = list(product(MODELS, CLUSTERS, STEPS))
    Random(7).shuffle(cases)
    with out.open("w") as lines:
        for model, cluster, (batch, length) in cases:
            if time.monotonic() - began > seconds:
                break
            start = time.process_time()
            training = {"sequence_length": length, "global_batch": batch}
            try:
                plan = bigplan.plan(
                    model=model, cluster=cluster, training=training, engine="native"
                )
                told = plan.predicted.step_seconds, wear_of(plan) is not None
            except (bigplan.errors.InfeasibleError, bigplan.errors.InputError):
                told = None, False
            case = f"{model} {cluster} {batch} x {length}"
            row = [case, *told, round(time.process_time() - start, 2)]
            print(json.dumps(row), file=lines, flush=True)


if __name__ == "__main__":
    main()
