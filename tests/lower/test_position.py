"""Chunks of layers that a stage has, and their neighbours."""

from __future__ import annotations

import pytest

from bigplan.graph.strategy import Strategy
from bigplan.lower.position import Position
from tests.toys import toy_graph


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_chunks_follow_each_other_over_the_stages(pp: int, vpp: int) -> None:
    graph = toy_graph(blocks=12, strategy=Strategy(dp=1, pp=pp, vpp=vpp))
    stages = [Position.of(graph, stage) for stage in range(pp)]
    in_order = [stage.chunks[turn] for turn in range(vpp) for stage in stages]
    assert [layer for chunk in in_order for layer in chunk] == list(range(len(graph.layers)))
    # What one chunk sends the next one waits for.
    assert {end + 1 for stage in stages for end in stage.ends} == {
        start for stage in stages for start in stage.starts
    }
    assert sum(len(stage.starts) for stage in stages) == pp * vpp - 1


def test_the_ends_of_the_model_ask_for_the_batch() -> None:
    graph = toy_graph(blocks=6, strategy=Strategy(dp=1, pp=3))
    last = len(graph.layers) - 1
    assert [Position.of(graph, stage).takes_batch for stage in range(3)] == [0, None, last]
    alone = toy_graph(blocks=6)
    assert Position.of(alone, 0).takes_batch == 0


def test_the_loss_layer_holds_one_micro_batch() -> None:
    graph = toy_graph(blocks=4, strategy=Strategy(dp=1, pp=2, accumulation_group=2))
    first, last = (Position.of(graph, stage) for stage in range(2))
    assert last.held(last.loss) == 1
    assert first.held(0) > last.held(last.chunks[0][0])
    assert first.held(0) % 2 == 0
