from __future__ import annotations

import pytest
from hypothesis import given

from bigplan.graph.graph import Graph, Recompute, Tensor
from bigplan.graph.strategy import Strategy, chunk_blocks
from tests.toys import graphs, toy_graph, toy_kind


@given(graphs())
def test_chunks_partition_the_layers_in_order(graph: Graph) -> None:
    strategy, last = graph.strategy, len(graph.layers) - 1
    chunks = [graph.chunk_layers(i) for i in range(strategy.pp * strategy.vpp)]
    assert [layer for chunk in chunks for layer in chunk] == list(range(len(graph.layers)))
    blocks = [len(chunk) - (0 in chunk) - (last in chunk) for chunk in chunks]
    assert tuple(blocks) == chunk_blocks(last - 1, strategy)
    for stage in range(strategy.pp):
        mine = [chunks[i] for i in graph.stage_chunks(stage)]
        assert len(mine) == strategy.vpp
        assert graph.stage_layers(stage) == tuple(layer for chunk in mine for layer in chunk)


def test_units_in_flight() -> None:
    graph = toy_graph(Strategy(dp=1, pp=4, accumulation_group=2), units=3)
    assert (graph.micro_batches, graph.units) == (6, 3)
    assert [graph.in_flight_units(stage) for stage in range(4)] == [3, 3, 2, 1]


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("turns", [2, 3, 4])
def test_virtual_stages_hold_more_units(stages: int, turns: int) -> None:
    strategy = Strategy(dp=1, pp=stages, vpp=turns)
    graph = toy_graph(strategy, blocks=stages * turns, units=8 * stages)
    held = [graph.in_flight_units(0, turn) for turn in range(turns)]
    assert held == sorted(held, reverse=True)
    # 1 + (p - 1) / (p v) times the activations of a pipeline without them (Narayanan et al. 2021,
    # section 2.2), which holds p units of v chunks; each chunk reserves its own most.
    assert sum(held) >= (turns + 1) * stages - 1
    assert held[0] <= 2 * stages
    # The last stage turns its last chunk's micro-batches back at once.
    assert graph.in_flight_units(stages - 1, turns - 1) == 1


def test_sizes_of_kinds() -> None:
    kind = toy_kind("block")
    assert kind.parameters == 8 * 4 + 4
    assert [kind.kept(recompute) for recompute in Recompute] == [64, 32, 24, 16]
    # Recomputing brings back what was not kept.
    assert [kind.workspace(recompute) for recompute in Recompute] == [8, 8 + 32, 8 + 40, 8 + 64]
    assert Tensor("w", 3, 5).elements == 15
