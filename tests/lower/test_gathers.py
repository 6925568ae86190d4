"""ZeRO 1 and 2: updated parameters are gathered beside other layers' passes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bigplan.graph.graph import Graph
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower
from bigplan.program import Op, Program, expand
from bigplan.simulate import simulate
from tests.toys import COSTS, placed, toy_graph

FIRST, LAST = 0, -1


def _programs(graph: Graph) -> tuple[Program, ...]:
    return lower(graph, placed(graph))


def _places(program: Program, op: Op, layer: int) -> list[int]:
    actions = expand(program.step)
    return [at for at, a in enumerate(actions) if a.op is op and a.layer == layer]


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(dp=2, zero=1),
        Strategy(dp=2, zero=2),
        Strategy(dp=2, pp=2, zero=2),
        Strategy(dp=2, pp=2, vpp=2, zero=1),
    ],
)
def test_a_clipped_step_gathers_a_layer_before_the_forward_of_the_layer_before(
    strategy: Strategy,
) -> None:
    for program in _programs(toy_graph(strategy, blocks=4, units=2)):
        for before, layer in pairwise(program.layers):
            (gather,) = _places(program, Op.GATHER, layer)
            assert gather < _places(program, Op.FORWARD, before)[FIRST]


@pytest.mark.parametrize("zero", [1, 2])
def test_a_clipped_step_waits_for_the_first_gather_alone(zero: int) -> None:
    """A forward takes longer than the gather of the layer after it."""
    graph = toy_graph(Strategy(dp=2, zero=zero), blocks=4, units=2)
    events = simulate(_programs(graph), graph, COSTS).events
    end = max(e.end for e in events if e.op == "forward" and e.micro_batch == 0)
    update = graph.kinds["block"].owned(2) / COSTS.rates.gpu_update
    gather, forward = COSTS.kinds["block"].gather, COSTS.kinds["block"].forward
    # The second layer's update runs beside the first one's gather.
    assert end == pytest.approx(5 * update + gather + 6 * forward, abs=1e-9)


@pytest.mark.parametrize("zero", [1, 2])
def test_an_unclipped_step_gathers_beside_backwards(zero: int) -> None:
    graph = toy_graph(Strategy(dp=2, zero=zero), blocks=4, units=2, deferred=False)
    (program,) = _programs(graph)
    for layer in range(2, len(graph.layers)):
        gather = _places(program, Op.GATHER, layer)[LAST]
        assert gather < _places(program, Op.BACKWARD, layer - 2)[LAST]


def test_an_unclipped_chunk_is_gathered_beside_the_backward_of_the_chunk_before() -> None:
    graph = toy_graph(Strategy(dp=2, pp=2, vpp=2, zero=1), blocks=4, units=4, deferred=False)
    first, _ = _programs(graph)
    *before, chunk = first.layers  # of stage 0: blocks 1 and 3, and the embedding
    assert before == [0, 1]
    (gather,) = _places(first, Op.GATHER, chunk)
    assert gather < _places(first, Op.BACKWARD, 1)[LAST]
    assert gather > _places(first, Op.BACKWARD, chunk)[LAST]
