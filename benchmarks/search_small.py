"""Random workloads of four to eight layers on one small GPU: free plans beside pinned ones.

Usage: python -m benchmarks.search_small run OUT.jsonl [WORKLOADS] [free]    (a minute for six)
       python -m benchmarks.search_small show PINNED.jsonl [FREE.jsonl]

`run` plans each workload freely and with each of seven pins (`free`: without these), micro-batches
of one; workloads that do not fit are left out. `show` says how far free plans are above the best
plan known, of these or of others' PINNED, and how many have a pin more than 1.5% faster.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from bigplan.errors import InfeasibleError
from bigplan.solve.candidate import Workload
from bigplan.solve.pins import parse_pins
from bigplan.solve.search import Scope, search
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training

CLUSTERS = {"rtx-4090-workstation": (6, 24), "h200-1x": (12, 40), "t4-cloud": (6, 14)}  # GiB
PINS: tuple[dict[str, str | int | float], ...] = (
    {"gradients": "host"},
    {"optimizer": "host"},
    {"recompute": "full"},
    {"block.activations": "host"},
    {"streamed": 0.5},
    {"accumulation_group": 1},
    {"slots": 2},
)
FASTER = 1.015  # what simplicity may cost, and what is no difference


def workloads(number: int) -> Iterator[tuple[str, Workload]]:
    """So many with their names, drawn as those of tests/solve/test_properties.py."""
    draw = Random(1)
    for _ in range(number):
        cluster, model = draw.choice(sorted(CLUSTERS)), draw.choice(("llama-3-8b", "llama-2-13b"))
        gpu, host, layers = (
            draw.randint(*CLUSTERS[cluster]),
            draw.randint(16, 48),
            draw.randint(4, 8),
        )
        length, batch = draw.choice((1024, 4096)), draw.choice((4, 8, 16))
        precision = "fp16" if cluster == "t4-cloud" else "bf16"
        training = Training(sequence_length=length, global_batch=batch, precision=precision)
        spec = find_model(model).model_copy(update={"layers": layers})
        group = find_cluster(cluster).with_caps(gpu=gpu << 30, host=host << 30).group
        name = f"{model}/{layers} {cluster} {gpu} {host} GiB {batch}x{length}"
        yield name, Workload(spec, training, group)


def _seconds(workload: Workload, pinned: dict[str, str | int | float]) -> float | None:
    fixed, pins = parse_pins({"micro_batch": 1, **pinned})
    try:
        return search(workload, Scope(fixed, pins, told=False)).best.expected
    except InfeasibleError:
        return None


def run(out: Path, number: int, pins: tuple[dict[str, str | int | float], ...]) -> None:
    """Write a line for each workload that fits."""
    with out.open("a") as lines:
        for name, workload in workloads(number):
            start = time.process_time()
            if (free := _seconds(workload, {})) is not None:
                line: dict[str, Any] = {"name": name, "free": free}
                line |= {"cpu": time.process_time() - start}
                line |= {"pins": {str(pin): _seconds(workload, pin) for pin in pins}}
                print(json.dumps(line), file=lines, flush=True)


def show(pinned: Path, free: Path) -> None:
    """A line for each workload, and what all come to."""
    known, rows = (
        {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}
        for path in (pinned, free)
    )
    above, cpu = list[float](), 0.0
    for name in (n for n in rows if n in known):
        found = {pin: s for pin, s in known[name]["pins"].items() if s is not None}
        best = min(found, key=found.__getitem__)
        above.append(rows[name]["free"] / min(rows[name]["free"], known[name]["free"], found[best]))
        cpu += rows[name]["cpu"]
        ratio = rows[name]["free"] / found[best]
        print(f"{name:62s} {rows[name]['free']:9.4f} s, {ratio - 1:+6.2%} of {best}")
    beaten = sum(each > FASTER for each in above)
    print(
        f"{len(above)} workloads: {beaten} more than 1.5% above the best known, "
        f"{max(above) - 1:.1%} at most, {sum(above) / len(above) - 1:.2%} in the mean; "
        f"{cpu:.0f} CPU s"
    )


if __name__ == "__main__":
    if sys.argv[1] == "run":
        few = int(sys.argv[3]) if len(sys.argv) > 3 else 40
        run(Path(sys.argv[2]), few, () if sys.argv[4:] == ["free"] else PINS)
    else:
        show(Path(sys.argv[2]), Path(sys.argv[-1]))
