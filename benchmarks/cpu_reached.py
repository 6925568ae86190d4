"""What the CPU's updates and the copies beside them reached in steps, of what was measured before.

    python -m benchmarks.cpu_reached

1. Of every run on an H200 since the rates of a profile are of updates beside copies, but those that
   wait for a drive: seconds of the updates as promised over those measured, sorted, and the middles
   of fifths. `solve/candidate.py` chooses plans by them (REACHED).
2. Of steps whose trace and plan are here: GB/s to the host while the CPU updated, activations and
   chunks of state together, and the part of what chunks reached beside updates just before.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median

from bigplan.plan import Plan, load_plan
from bigplan.planner import programs_of
from bigplan.program import Lane, Op, expand
from bigplan.timeline import Event

RESULTS = Path(__file__).parent / "results"
EARLIER = "2026-11-22-h200-lanes"  # chunks still held up what else was copied, and so the update
LEAST = 0.3  # seconds of promised updates: shorter ones are mostly waiting
LEAVE = (Op.SAVE, Op.STATE_OUT)


def reached() -> list[float]:
    """Promised over measured seconds of the CPU's updates, a run each, sorted."""
    found = []
    for promises in sorted(RESULTS.glob("2026-11-2[23]-h200-*/**/predictions.json")):
        if EARLIER in promises.parts:
            continue
        for name, promised in json.loads(promises.read_text()).items():
            record = promises.with_name(f"{name}.json")
            if not record.exists() or name.startswith("d"):
                continue
            expected = promised["busy_seconds"].get("cpu", 0.0)
            measured = json.loads(record.read_text())["busy_seconds"].get("cpu", 0.0)
            if expected > LEAST and measured:
                found.append(expected / measured)
    return sorted(found)


def leaving(plan: Plan, events: list[Event]) -> float:
    """Bytes/s of activations and state that left while the CPU updated."""
    _, (program, *_) = programs_of(plan)
    nbytes, seconds, moved = defaultdict[str, int](int), defaultdict[str, float](float), 0.0
    for action in expand(program.step):
        nbytes[action.op] += action.amount if action.op in LEAVE else 0
    for event in events:
        seconds[event.op] += event.end - event.start
    ends = max(e.end for e in events if (e.lane, e.op) == (Lane.CPU, Op.UPDATE))
    leave = [event for event in events if event.op in LEAVE]
    for event in leave:
        part = max(0.0, min(event.end, ends) - event.start) / seconds[event.op]
        moved += part * nbytes[event.op]
    return moved / (ends - min(event.start for event in leave if event.op is not Op.STATE_OUT))


def main() -> None:
    """Print them."""
    ratios = reached()
    print(f"{len(ratios)} runs: {' '.join(f'{ratio:.2f}' for ratio in ratios)}")
    ends = [len(ratios) * part // 5 for part in range(6)]
    fifths = [ratios[start:end] for start, end in pairwise(ends)]
    print("middles of fifths:", " ".join(f"{median(fifth):.2f}" for fifth in fifths))
    for trace in sorted(RESULTS.glob("*/**/*.trace.json")):
        path = trace.with_name(trace.name.replace(".trace.json", ".plan.yaml"))
        if path.exists():
            plan = load_plan(path)
            events = [Event(0, *event) for event in json.loads(trace.read_text())]
            rate = leaving(plan, events)
            alone = plan.cluster.group.pcie.node_device_to_host_beside_update
            name = f"{trace.parent.relative_to(RESULTS)} {path.name.removesuffix('.plan.yaml')}"
            print(f"{name}: {rate / 1e9:.1f} GB/s, {rate / alone:.2f}" if alone else name)


if __name__ == "__main__":
    main()
