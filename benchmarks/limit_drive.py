"""The drive that limit.py's cases put state on: its room, and what it did in a traced step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from math import ceil
from pathlib import Path

from bigplan.spec.catalog import find_cluster
from bigplan.spec.files.dump import to_yaml
from bigplan.timeline import Event

KEPT_FREE = 6 << 30  # bytes of a drive for logs and what is compiled
LANES = "nvme read", "nvme write"
WINDOW = 4  # seconds over which a step's rates are told


def room(path: Path, folder: Path) -> None:
    """Let the cluster file's drive, which holds `folder`, have nearly all that is free there."""
    cluster = find_cluster(str(path))
    capacity = shutil.disk_usage(folder).free - KEPT_FREE
    told = {"capacity": f"free on the drive, less {KEPT_FREE >> 30} GiB: benchmarks/limit.py"}
    assert cluster.group.nvme is not None, "the cluster has no drive: profile with --nvme"
    drives = cluster.group.nvme.replaced({"capacity": capacity}, told)
    group = cluster.group.model_copy(update={"nvme": drives})
    path.write_text(to_yaml(cluster.model_copy(update={"node_groups": (group,)})))
    print(f"{capacity / 2**30:.1f} GiB on the drive", flush=True)


def in_steps(out: Path) -> None:
    """What the drive did in the traced step of every case on it, and that step's floor.

    The floor is the GPU's work that nothing of the update can hide under (all but the first
    group's forward and updates) and, after it, the drive's bytes at the rate of this very step.
    """
    promised = json.loads((out / "predictions.json").read_text())
    for path in sorted(out.glob("*.trace.json")):
        name = path.name.removesuffix(".trace.json")
        moved = promised[name]["moved_bytes"]
        events = [
            Event(0, *action) for action in json.loads(path.read_text()) if action[1] != "free"
        ]
        drive = [event for event in events if event.lane in LANES]
        if drive:
            print(f"\n{name}")
            for lane in LANES:
                each = moved[lane] / sum(event.lane == lane for event in drive)
                print(f"  {lane:10s}", *(f"{rate:.2f}" for rate in _over_time(drive, lane, each)))
            group = promised[name]["strategy"].get("accumulation_group", 1)
            _print_floor(events, drive, sum(moved[lane] for lane in LANES), group)


def _over_time(drive: list[Event], lane: str, nbytes: float) -> Iterator[float]:
    """GB/s of a lane in each WINDOW seconds; its actions move `nbytes` each."""
    own = [event for event in drive if event.lane == lane]
    for start in range(0, ceil(max(event.end for event in own)), WINDOW):
        shares = (
            max(0.0, min(e.end, start + WINDOW) - max(e.start, start)) / e.seconds for e in own
        )
        yield sum(shares) * nbytes / WINDOW / 1e9


def _print_floor(events: list[Event], drive: list[Event], nbytes: int, group: int) -> None:
    step, last = (max(event.end for event in some) for some in (events, drive))
    behind = sum(
        event.seconds
        for event in events
        if event.lane == "gpu compute"
        and event.op != "update"
        and not (event.op == "forward" and event.micro_batch < group)
    )
    floor = behind + last
    print(
        f"  {nbytes / last / 1e9:.2f} GB/s until {last:.2f} s of {step:.2f}; floor {behind:.2f} + "
        f"{last:.2f} = {floor:.2f} s, {floor / step:.0%} of the step"
    )
