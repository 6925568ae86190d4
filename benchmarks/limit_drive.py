"""The drive that limit.py's cases put state on: its room, and its rates of the moment.

A virtual machine's drive is shared: one gave 0.9 to 1.3 GB/s each way within ten minutes. So it is
measured once more before every case that uses it, which is planned and predicted with these rates,
and again when the case has run.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch

from bigplan.profile.bench import Bench
from bigplan.profile.drive import measure_drive
from bigplan.spec.catalog import find_cluster
from bigplan.spec.cluster import Cluster, Nvme
from bigplan.spec.dump import to_yaml

KEPT_FREE = 6 << 30  # bytes of a drive for logs and what is compiled
SECONDS = 8.0  # of measuring


def room(path: Path, folder: Path) -> None:
    """Let the cluster file's drive, which holds `folder`, have nearly all that is free there."""
    cluster = find_cluster(str(path))
    capacity = shutil.disk_usage(folder).free - KEPT_FREE
    told = {"capacity": f"free on the drive, less {KEPT_FREE >> 30} GiB: benchmarks/limit.py"}
    drives = _drives(cluster).replaced({"capacity": capacity}, told)
    group = cluster.group.model_copy(update={"nvme": drives})
    path.write_text(to_yaml(cluster.model_copy(update={"node_groups": (group,)})))
    print(f"{capacity / 2**30:.1f} GiB on the drive", flush=True)


def with_drive_now(path: Path, folder: Path) -> Cluster:
    """The cluster file's cluster with its drive's rates of this moment."""
    cluster = find_cluster(str(path))
    cpu = Bench((torch.device("cpu"),), 1, 1, folder, clock=time.perf_counter)
    group = measure_drive(cluster.group, cpu, SECONDS)
    return cluster.model_copy(update={"node_groups": (group,)})


def rates_of(cluster: Cluster) -> dict[str, float]:
    """Bytes/s of reading alone, writing alone, and both together."""
    drives = _drives(cluster)
    both = drives.both_ways or drives.read + drives.write
    return {"read": drives.read, "write": drives.write, "both_ways": both}


def _drives(cluster: Cluster) -> Nvme:
    assert cluster.group.nvme is not None, "the cluster has no drive: profile with --nvme"
    return cluster.group.nvme
