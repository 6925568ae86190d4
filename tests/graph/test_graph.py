from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigplan.graph.graph import Gemm, Recompute, Tensor
from bigplan.graph.strategy import Strategy
from tests.toys import toy_graph, toy_kind


@given(st.sampled_from((1, 2, 3, 4, 6)), st.integers(1, 5))
def test_stages_partition_the_layers_in_order(stages: int, each: int) -> None:
    graph = toy_graph(Strategy(dp=1, pp=stages), blocks=stages * each)
    parts = [graph.stage_layers(stage) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(len(graph.layers)))
    blocks = [sum(graph.layers[layer] == "block" for layer in part) for part in parts]
    assert blocks == [each] * stages
    assert graph.layers[parts[0][0]] == "embedding"
    assert graph.layers[parts[-1][-1]] == "head"


def test_units_in_flight() -> None:
    graph = toy_graph(Strategy(dp=1, pp=4, accumulation_group=2), units=3)
    assert (graph.micro_batches, graph.units) == (6, 3)
    assert [graph.in_flight_units(stage) for stage in range(4)] == [3, 3, 2, 1]


def test_sizes_of_kinds() -> None:
    kind = toy_kind("block")
    assert kind.parameters == 8 * 4 + 4
    assert (kind.kept(Recompute.NONE), kind.kept(Recompute.FULL)) == (64, 16)
    # Recomputing brings back everything the forward saves.
    assert (kind.workspace(Recompute.NONE), kind.workspace(Recompute.FULL)) == (8, 8 + 64)
    assert Tensor("w", 3, 5).elements == 15
    assert Gemm(2, 3, 4, count=5).flops == 2 * 2 * 3 * 4 * 5
