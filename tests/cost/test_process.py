from __future__ import annotations

import pytest

from bigplan.cost.process import (
    FIRST_VALUES,
    NODE,
    RANK,
    locked_bytes,
    process_bytes,
    room,
)
from bigplan.spec.catalog import find_cluster
from bigplan.spec.cluster import NodeGroup

GiB = 1 << 30


def _nodes(memory: int, device: str = "cuda") -> NodeGroup:
    group = find_cluster("h200-1x").group
    host = group.host.model_copy(update={"memory": memory})
    gpu = group.gpu.model_copy(update={"device": device})
    return group.model_copy(update={"host": host, "gpu": gpu})


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("memory", [64 * GiB, 120 * GiB, 2048 * GiB])
def test_tensors_and_processes_fill_a_node_and_no_more(memory: int, ranks: int) -> None:
    nodes = _nodes(memory)
    placed = room(nodes, ranks)
    whole = placed + locked_bytes(nodes, placed) + process_bytes(nodes, ranks)
    assert 0.999 * memory < whole <= memory


def test_every_rank_and_every_core_counts() -> None:
    nodes = _nodes(120 * GiB)
    cores = nodes.host.cores
    assert process_bytes(nodes, 1) == NODE + RANK + cores * FIRST_VALUES
    assert process_bytes(nodes, 4) - process_bytes(nodes, 3) == RANK


def test_processes_alone_may_fill_a_small_node() -> None:
    nodes = _nodes(2 * GiB)
    assert room(nodes, 1) == 2 * GiB - process_bytes(nodes, 1) < 0


def test_a_cpu_that_stands_in_for_a_gpu_leaves_half_of_its_machine_out() -> None:
    nodes = _nodes(4 * GiB, "cpu")
    assert room(nodes, 2) == 4 * GiB
    assert process_bytes(nodes, 2) == locked_bytes(nodes, GiB) == 0
