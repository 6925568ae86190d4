"""How many chunks of streamed state the GPU has room for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigplan.graph.build import build_graph
from bigplan.graph.strategy import Strategy
from bigplan.lower.entries import streaming_bytes, streaming_entries
from bigplan.mechanics import OPERATIONS_A_BYTE
from bigplan.spec.catalog import find_model
from bigplan.spec.training import Training
from tests.toys import toy_graph

MODEL = find_model("llama-3-8b")


def test_a_graph_that_computes_nothing_has_the_least() -> None:
    graph = toy_graph()
    kinds = {name: replace(kind, forward=(), backward=()) for name, kind in graph.kinds.items()}
    assert streaming_entries(replace(graph, kinds=kinds)) == 4


@pytest.mark.parametrize(("length", "entries"), [(1024, 4), (4096, 4), (32768, 9), (131072, 12)])
def test_chunks_arrive_while_the_longest_product_runs(length: int, entries: int) -> None:
    """At 32k tokens gate and up are 7.7 tera-operations, attention 8.8: 630 MB arrive meanwhile."""
    training = Training(sequence_length=length, global_batch=1)
    graph = build_graph(MODEL, training, Strategy(dp=1), fused=True)
    assert streaming_entries(graph) == entries
    arriving = 8.8e12 / OPERATIONS_A_BYTE / streaming_bytes(graph)
    if length == 32768:
        assert entries - 2 >= arriving > entries - 3
