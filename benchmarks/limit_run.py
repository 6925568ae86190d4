"""Runs a plan by the runtime's worker alone and keeps what its steps took.

For limit.py and hosts.py. First weights are those of one layer for all layers of a kind, which
changes losses and not seconds. With LIMIT_TRACE in the environment, the actions of the median step
are written, too. On a CPU device there are no clocks and no counts of the allocator.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from bigplan.plan import Plan
    from bigplan.profile.sensors import Reading
    from bigplan.rectangle import Rectangle
    from bigplan.runtime.weights.first_values import FirstValues
    from bigplan.runtime.worker import NativeWorker
    from bigplan.spec.model import ModelSpec
    from bigplan.spec.step import Parameter
    from bigplan.spec.training import Training
    from bigplan.timeline import Timeline

READ_EVERY = 0.25  # seconds between looks at the GPU's clock and power


class Amount(NamedTuple):
    """How much is run: so many steps, but none that would end after its time; always two."""

    steps: int
    seconds: float = float("inf")
    """from the worker's start; ranks that train together have no clock in common: leave it out"""


@contextmanager
def trained(
    plan: Plan, scratch: Path, amount: Amount, rank: int = 0, meeting: Path = Path()
) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Run a plan as this rank of it; its steps, and what of them is kept. Then close the worker."""
    from bigplan.runtime import worker as module
    from bigplan.runtime.worker import NativeWorker

    module.first_values = alike  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    worker = NativeWorker(plan, rank, scratch)
    started = time.perf_counter()
    worker.preflight()
    worker.start(meeting)
    ready = time.perf_counter() - started
    try:
        steps = measured_steps(worker, amount.steps, started + amount.seconds)
        # No finish(): it applies the last update, with state on a drive for 20 s more.
        yield steps, recorded(steps) | {"start_seconds": ready}
    finally:
        worker.close()


def keep(path: Path, steps: list[dict[str, Any]], record: dict[str, Any]) -> None:
    """The record as PATH.json; with LIMIT_TRACE also the median step's actions."""
    Path(f"{path}.json").write_text(json.dumps(record, indent=1))
    if os.environ.get("LIMIT_TRACE"):
        events = [
            [e.lane, e.op, e.layer, e.micro_batch, round(e.start, 5), round(e.end, 5)]
            for e in median_of(steps)["timeline"].events
        ]
        Path(f"{path}.trace.json").write_text(json.dumps(events))


def measured_steps(worker: NativeWorker, number: int, end: float) -> list[dict[str, Any]]:
    """So many steps, or as many as end by `end`, of which two are run in any case."""
    steps: list[dict[str, Any]] = []
    while len(steps) < max(2, number):
        if len(steps) >= 2 and time.perf_counter() + steps[-1]["seconds"] > end:
            print(f"  time is over after {len(steps)} steps", flush=True)
            break
        steps.append(measured_step(worker))
    return steps


def measured_step(worker: NativeWorker) -> dict[str, Any]:
    """One step: seconds, loss, timeline, and what device and allocator did in it."""
    from bigplan.profile.sensors import watching

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    before = Counter(torch.cuda.memory_stats() if cuda else {})
    with watching(device, READ_EVERY) as watch:
        result = worker.step()
    after = Counter(torch.cuda.memory_stats() if cuda else {})
    outside = result.seconds - result.timeline.seconds
    step = f"step {result.step}: {result.seconds:.3f} s, loss {result.loss:.4f}"
    times = f"{1e3 * outside:.0f} ms outside of actions"
    print(f"  {step}; {times}; {str(watch) or 'clock not known'}", flush=True)
    return {
        "seconds": result.seconds,
        "loss": result.loss,
        "outside_seconds": outside,
        "retries": after["num_alloc_retries"] - before["num_alloc_retries"],
        "device_allocs": after["num_device_alloc"] - before["num_device_alloc"],
        "readings": watch.readings,
        "memory": result.memory,
        "timeline": result.timeline,
    }


def median_of(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The step of median seconds; the first, which warms up, is left out."""
    ordered = sorted(steps[1:], key=lambda step: step["seconds"])
    return ordered[(len(ordered) - 1) // 2]


def recorded(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """What of a case's steps is kept: each one's figures, and the actions of the median one."""
    timeline: Timeline = median_of(steps)["timeline"]
    return {
        "seconds": [step["seconds"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "outside_seconds": [step["outside_seconds"] for step in steps],
        "retries": [step["retries"] for step in steps],
        "device_allocs": [step["device_allocs"] for step in steps],
        "gpu_state": state_of(steps[1:]),
        "memory": {str(tier): used for tier, used in steps[-1]["memory"].items()},
        "max_reserved": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
        "max_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "op_seconds": timeline.total_by(lambda event: event.op),
        "busy_seconds": timeline.total_by(lambda event: event.lane),
    }


def state_of(steps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Mean SM clock in Hz and power in W over these steps, and what limited the clock."""
    from bigplan.profile.sensors import mean, told

    readings: list[Reading] = [reading for step in steps for reading in step["readings"]]
    found = mean(readings)
    if found is None:
        return None
    return {"clock_hertz": found.clock, "power_watts": found.power, "told": told(found)}


def alike(model: ModelSpec, training: Training) -> FirstValues:
    """The runtime's seeded first values, but every layer of a kind has those of the first."""
    from bigplan.runtime.weights.first_values import first_values

    drawn = first_values(model, training)
    kept: dict[Rectangle, Tensor] = {}

    def first(kind: str, layer: int, parameter: Parameter, part: Rectangle) -> Tensor:
        if kind != "block":  # of the others there is one
            return drawn(kind, layer, parameter, part)
        if part not in kept:
            kept[part] = drawn(kind, 1, parameter, part)
        return kept[part]

    return first


def tell(name: str, predicted: dict[str, Any], record: dict[str, Any]) -> None:
    """A run's step, its seconds by lane and by operation, and its memory: predicted / measured."""
    measured = statistics.median(record["seconds"][1:])
    print(
        f"  {name}: measured {measured:.3f} predicted {predicted['step_seconds']:.3f} "
        f"x{measured / predicted['step_seconds']:.3f}; start {record['start_seconds']:.0f} s; "
        f"retries {record['retries']} allocs {record['device_allocs']}"
    )
    for kind in ("busy_seconds", "op_seconds"):
        promised, found = predicted[kind], record[kind]
        both = (
            f"{key} {promised.get(key, 0.0):.3f}/{found.get(key, 0.0):.3f}"
            for key in promised | found
        )
        print("   ", ", ".join(both))
    for tier, used in record["memory"].items():
        nbytes = predicted["memory"].get(tier, 0)
        print(f"    {tier}: promised {nbytes / 2**30:.2f} measured {used / 2**30:.2f} GiB")
