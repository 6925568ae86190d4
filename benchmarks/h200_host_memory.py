"""What a launch takes of a machine's host memory beside what its plan promises.

    python benchmarks/h200_host_memory.py slabs GIB...   page-locked slabs of these sizes, no Ray
    python benchmarks/h200_host_memory.py watch OUT.json COMMAND...   any command: the least
        MemAvailable while it runs, and the memory of every process of its tree at that time

Every figure is of /proc: MemAvailable, and proportional set sizes (Pss) by process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GiB = 1 << 30


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) << 10 for fields in lines}


def told(before: dict[str, int], now: dict[str, int]) -> str:
    """What became of memory since, in GiB."""
    names = (
        "MemTotal",
        "MemAvailable",
        "MemFree",
        "PageTables",
        "Slab",
        "AnonPages",
        "AnonHugePages",
        "Shmem",
        "Mlocked",
        "Unevictable",
        "KernelStack",
        "Percpu",
        "VmallocUsed",
    )
    parts = [
        f"{name} {(now[name] - before[name]) / GiB:+.3f}"
        for name in names
        if name in now and name in before
    ]
    return ", ".join(parts)


def slabs(sizes: list[float]) -> None:
    """One process with CUDA, and slabs of several sizes after each other."""
    start = meminfo()
    total, available = start["MemTotal"] / GiB, start["MemAvailable"] / GiB
    print(f"at the start: MemTotal {total:.2f}, MemAvailable {available:.2f}")
    import torch

    print("torch:", told(start, meminfo()))
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    (x @ x).sum().item()
    print("CUDA and a product:", told(start, meminfo()))
    from bigplan.runtime.memory.slab import Slab

    Slab(1 << 20, pinned=True)
    for size in sizes:
        before, free = meminfo(), torch.cuda.mem_get_info()[0]
        began = time.perf_counter()
        slab = Slab(int(size * GiB), pinned=True)
        took = time.perf_counter() - began
        now = meminfo()
        lost = before["MemAvailable"] - now["MemAvailable"]
        beside = f"{lost / GiB:.3f} lost, {lost / GiB - size:+.3f} beside, in {took:.1f} s"
        of_gpu = (free - torch.cuda.mem_get_info()[0]) / (1 << 20)
        print(f"slab of {size} GiB: {beside}, {of_gpu:.1f} MiB of the GPU; {told(before, now)}")
        slab.close()
        del slab
        time.sleep(1)


def tree(pid: int) -> dict[str, Any]:
    """Pss by process of everything below `pid` or with bigplan or ray in its command."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:90]
            if not command or "h200_host_memory" in command:
                continue
            rollup = {
                line.split()[0].rstrip(":"): int(line.split()[1]) << 10
                for line in (folder / "smaps_rollup").read_text().splitlines()[1:]
            }
            status = dict(
                line.split(":", 1)
                for line in (folder / "status").read_text().splitlines()
                if ":" in line
            )
        except (OSError, ValueError):
            continue
        if rollup["Pss"] > 20 << 20:
            found[f"{folder.name} {command}"] = {
                name: round(rollup.get(name, 0) / GiB, 3)
                for name in (
                    "Pss",
                    "Rss",
                    "Pss_Anon",
                    "Pss_File",
                    "Pss_Shmem",
                    "Locked",
                    "AnonHugePages",
                )
            } | {"VmPTE": status.get("VmPTE", "").strip(), "VmRSS": status.get("VmRSS", "").strip()}
    return found


def watch(out: Path, command: list[str]) -> None:
    """Run it; the memory at its fullest."""
    start = meminfo()
    process = subprocess.Popen(command)
    least, worst, processes = start["MemAvailable"], start, {}
    seen = 0.0
    while process.poll() is None:
        now = meminfo()
        if now["MemAvailable"] < least - (64 << 20) or (
            time.monotonic() - seen > 5 and now["MemAvailable"] < least + (64 << 20)
        ):
            least, worst = min(least, now["MemAvailable"]), now
            processes, seen = tree(process.pid), time.monotonic()
        time.sleep(0.1)
    record = {
        "command": command,
        "code": process.returncode,
        "before_GiB": {k: round(v / GiB, 3) for k, v in start.items() if v > 1 << 20},
        "fullest_GiB": {k: round(v / GiB, 3) for k, v in worst.items() if v > 1 << 20},
        "lost_GiB": round((start["MemAvailable"] - least) / GiB, 3),
        "processes_GiB": processes,
    }
    out.write_text(json.dumps(record, indent=1))
    print(f"lost {record['lost_GiB']} GiB of MemAvailable; {told(start, worst)}")
    for name, sizes in processes.items():
        print("   ", name, sizes)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["slabs", *sizes] if sizes:
            slabs([float(size) for size in sizes])
        case ["watch", out, *command] if command:
            watch(Path(out), command)
        case _:
            sys.exit(__doc__)
