from __future__ import annotations

import pytest
from hypothesis import given

from bigplan.graph.graph import Graph
from bigplan.graph.strategy import Strategy
from bigplan.solve.stage import stage_classes
from tests.toys import graphs, toy_graph


@given(graphs())
def test_classes_cover_the_pipeline_and_their_stages_are_alike(graph: Graph) -> None:
    classes = stage_classes(graph)
    stages = [stage for each in classes for stage in each.stages]
    assert stages == list(range(graph.strategy.pp))
    for each in classes:
        for stage in each.stages:
            names = [graph.layers[layer] for layer in graph.stage_layers(stage)]
            assert dict(each.counts) == {name: names.count(name) for name in names}
    assert [each.last for each in classes] == [False] * (len(classes) - 1) + [True]


@pytest.mark.parametrize(
    ("pp", "names"), [(1, ["all"]), (2, ["first", "last"]), (4, ["first", "middle", "last"])]
)
def test_names_and_activations_in_flight(pp: int, names: list[str]) -> None:
    graph = toy_graph(Strategy(dp=1, pp=pp, accumulation_group=2), units=8)
    classes = stage_classes(graph)
    assert [each.name for each in classes] == names
    # The fullest stage of a class is its first.
    assert [each.held for each in classes] == [2 * (pp - each.stages[0]) for each in classes]
    few = stage_classes(toy_graph(Strategy(dp=1, pp=pp), units=1))
    assert [each.held for each in few] == [1] * len(few)
