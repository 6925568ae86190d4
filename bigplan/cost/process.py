"""Memory that a launch takes besides what its plan places there: of the host, and of the GPU.

Measured with CUDA on an H200's machine (benchmarks/results/2026-11-23-h200-promises). Page-locked
memory has page tables, and the driver keeps a record of every page of it. A rank's process has
Python, torch and its libraries, and what CUDA and the driver allocate for it. A node has Ray's
processes and those of a launch.
"""

from __future__ import annotations

from bigplan.spec.cluster import NodeGroup

LOCKED = 0.014  # of page-locked memory, 8 to 64 GiB: 1.2 to 1.4%
RANK = int(2.4 * 2**30)
NODE = int(0.65 * 2**30)
# The GPU's own page tables have 8 bytes a page of 4 KiB: 16, 64, 128 and 200 MiB for 8, 32, 64 and
# 100 GiB (benchmarks/results/2026-11-24-h200-sharded/page_tables.txt).
PAGE_TABLES = 8 / 4096
# Bytes a core while first weights are made or read: two blocks of 2^20 elements in fp32, and one in
# another precision (runtime/weights/homes.py). Whatever the layers, a start from random values
# takes 0.06 to 0.07 GiB on two cores, from safetensors 0.08, and from a checkpoint less than 0.01
# (benchmarks/host_starts.py).
FIRST_VALUES = 12 << 20


def process_bytes(nodes: NodeGroup, ranks: int) -> int:
    """Bytes of a node's host memory that `ranks` processes take.

    0 on a CPU that stands in for a GPU, because detection leaves out half of that machine's memory
    (spec/detect/cluster.py).
    """
    if not nodes.gpu.runs_kernels:
        return 0
    return NODE + ranks * RANK + nodes.host.cores * FIRST_VALUES


def locked_bytes(nodes: NodeGroup, placed: int) -> int:
    """Bytes that page-locking takes besides the `placed` bytes themselves."""
    return round(LOCKED * max(0, placed)) if nodes.gpu.runs_kernels else 0


def room(nodes: NodeGroup, ranks: int) -> int:
    """Bytes of a node's host memory that are left for a plan's tensors.

    Negative where processes alone need more than there is, by what they need more.
    """
    free = nodes.host.memory - process_bytes(nodes, ranks)
    left = free - locked_bytes(nodes, free)
    return min(left, nodes.host.tensor_memory or left)


def block_of(nbytes: int) -> int:
    """Bytes that torch's allocator of page-locked memory takes for so many: a power of two."""
    return 1 << max(0, nbytes - 1).bit_length()
