"""What the shared parts of a machine reach at this moment: its CPU, host memory and drive.

A virtual machine's neighbours use them, too. One machine's CPU updated 4.4 G parameters a second in
the profile and 1.9 to 3.7 half an hour later; one drive gave 0.9 to 1.3 GB/s within ten minutes.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from bigplan.profile.bench import Bench
from bigplan.profile.drive import measure_drive
from bigplan.profile.host import measure_cpu_update, measure_host
from bigplan.spec.catalog import find_cluster
from bigplan.spec.cluster import Cluster
from bigplan.spec.detect.machine import available_cores

# Of measuring: as long as `bigplan profile --quick` takes for each.
SUM_SECONDS, UPDATE_SECONDS, DRIVE_SECONDS = 3.0, 4.5, 8.0


def cluster_now(path: Path, folder: Path, *, drive: bool) -> Cluster:
    """The cluster file's cluster with rates of this moment; with `drive` also of `folder`'s."""
    cluster, cores = find_cluster(str(path)), available_cores()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench((device,), cores, cores, folder, clock=time.perf_counter)
    group = measure_cpu_update(
        measure_host(cluster.group, bench, SUM_SECONDS), bench, UPDATE_SECONDS
    )
    if drive:
        group = measure_drive(group, bench, DRIVE_SECONDS)
    return cluster.model_copy(update={"node_groups": (group,)})


def rates_of(cluster: Cluster, *, drive: bool) -> dict[str, float]:
    """Those rates: parameters that the CPU updates, or bytes, a second."""
    host, nvme = cluster.group.host, cluster.group.nvme
    rates = {
        "host_memory": host.memory_bandwidth,
        "cpu_adam": host.adam_rate,
        "cpu_adam_beside_copies": host.adam_rate_beside_copies or host.adam_rate,
    }
    if drive:
        assert nvme is not None, "the cluster has no drive: profile with --nvme"
        both = nvme.both_ways or nvme.read + nvme.write
        rates |= {"drive_read": nvme.read, "drive_write": nvme.write, "drive_both_ways": both}
    return rates
