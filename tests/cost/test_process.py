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
LAYER = 200_000_000  # parameters


def _nodes(memory: int, device: str = "cuda") -> NodeGroup:
    group = find_cluster("h200-1x").group
    host = group.host.model_copy(update={"memory": memory})
    gpu = group.gpu.model_copy(update={"device": device})
    return group.model_copy(update={"host": host, "gpu": gpu})


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("memory", [64 * GiB, 120 * GiB, 2048 * GiB])
def test_tensors_and_processes_fill_a_node_and_no_more(memory: int, ranks: int) -> None:
    nodes = _nodes(memory)
    placed = room(nodes, ranks, LAYER)
    whole = placed + locked_bytes(nodes, placed) + process_bytes(nodes, ranks, LAYER)
    assert 0.999 * memory < whole <= memory


def test_every_rank_and_its_largest_layer_count() -> None:
    nodes = _nodes(120 * GiB)
    assert process_bytes(nodes, 1, 0) == NODE + RANK
    one_more = process_bytes(nodes, 4, LAYER) - process_bytes(nodes, 3, LAYER)
    assert one_more == RANK + FIRST_VALUES * LAYER


def test_processes_alone_may_fill_a_small_node() -> None:
    assert room(_nodes(2 * GiB), 1, LAYER) == 0


def test_a_cpu_that_stands_in_for_a_gpu_leaves_half_of_its_machine_out() -> None:
    nodes = _nodes(4 * GiB, "cpu")
    assert room(nodes, 2, LAYER) == 4 * GiB
    assert process_bytes(nodes, 2, LAYER) == locked_bytes(nodes, GiB) == 0


def test_a_launch_that_was_killed_would_not_have_been_planned() -> None:
    """A plan of 111.8 GiB for qwen2.5-7b, stopped at 118.7 GiB of its machine's 125.9 in use.

    Its largest layer is the table of 152,064 words of 3,584. It is no run that constants are from.
    """
    placed, table = int(111.8 * GiB), 152_064 * 3_584
    nodes = _nodes(int(0.94 * 125.9 * GiB))
    whole = placed + locked_bytes(nodes, placed) + process_bytes(nodes, 1, table)
    assert whole > 118.7 * GiB
    assert room(nodes, 1, table) < placed
