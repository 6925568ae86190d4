"""Pipeline schedules: which pass comes when, and how long ideal passes take."""

from __future__ import annotations

import pytest

from bigplan.cost import Costs, KindCost, Rates
from bigplan.graph.graph import Graph
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower
from bigplan.program import Op, expand
from bigplan.simulate import simulate, step_seconds
from bigplan.spec.sharing import NodeSharing
from bigplan.units import PerRank
from bigplan.verify import verify
from tests.toys import COSTS, ROOMY, instructions, placed, toy_graph

PASSES = {"embedding": KindCost(0, 0), "block": KindCost(1, 2), "head": KindCost(0, 0)}
IDEAL = Costs(PASSES, Rates(*[PerRank(1e15)] * 10), 0.0, COSTS.capacity, NodeSharing(1))


def _interleaved(stages: int, chunks: int, rounds: int, blocks: int = 1) -> Graph:
    strategy = Strategy(dp=1, pp=stages, vpp=chunks)
    return toy_graph(strategy, blocks=stages * chunks * blocks, units=stages * rounds)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 4), (4, 2), (4, 3), (3, 2)])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_virtual_stages_divide_the_bubble(stages: int, chunks: int, rounds: int) -> None:
    graph = _interleaved(stages, chunks, rounds)
    programs = lower(graph, placed(graph))
    verify(programs, graph, ROOMY, NodeSharing(1))
    # A micro-batch takes 3 seconds in each of a stage's chunks; the bubble is stages - 1 chunks
    # (Narayanan et al. 2021, section 2.2), not stages - 1 stages.
    ideal = 3 * (stages * rounds * chunks + stages - 1)
    assert simulate(programs, graph, IDEAL).seconds == pytest.approx(ideal, abs=1e-6)
    assert step_seconds(programs, graph, IDEAL) == pytest.approx(ideal, abs=1e-6)


def test_chunks_come_in_turn() -> None:
    graph = _interleaved(2, 2, 2)
    _, last = lower(graph, placed(graph))
    passes = [
        f"{a.op.value[0]}{a.layer}.{a.micro_batch}"
        for a in expand(last.step)
        if a.op in (Op.FORWARD, Op.BACKWARD) and graph.layers[a.layer] == "block"
    ]
    # The last stage has blocks 2 and 4. Two micro-batches through each; backward in reverse.
    assert passes == [
        *("f2.0", "f2.1", "f4.0", "b4.0", "f4.1", "b4.1"),
        *("f2.2", "b2.0", "f2.3", "b2.1", "f4.2", "b4.2", "f4.3", "b4.3", "b2.2", "b2.3"),
    ]


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 3)])
def test_chunks_hold_what_is_between_their_forward_and_backward(stages: int, chunks: int) -> None:
    graph = _interleaved(stages, chunks, 5)
    for program in lower(graph, placed(graph)):
        alive, most = dict.fromkeys(program.layers, 0), dict.fromkeys(program.layers, 0)
        for action in expand(program.step):
            if action.op in (Op.FORWARD, Op.BACKWARD):
                alive[action.layer] += 1 if action.op is Op.FORWARD else -1
                most[action.layer] = max(most[action.layer], alive[action.layer])
        for layer in program.layers:
            assert program.buffers[f"a{layer}"].count == most[layer], (program.stage, layer)


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 8), (3, 4), (4, 2), (4, 3)])
def test_what_a_stage_holds_at_most(stages: int, chunks: int, rounds: int) -> None:
    """Wherever recomputation begins to keep more, from no layer on to the last alone."""
    graph = _interleaved(stages, chunks, rounds)
    for program in lower(graph, placed(graph)):
        blocks = [i for i in program.layers if graph.layers[i] == "block"]
        assert len(blocks) == chunks
        for first in range(chunks):
            counted = blocks[first:]
            alive = most = 0
            for action in expand(program.step):
                if action.layer in counted and action.op in (Op.FORWARD, Op.BACKWARD):
                    alive += 1 if action.op is Op.FORWARD else -1
                    most = max(most, alive)
            buffers = [program.buffers[f"a{layer}"] for layer in counted]
            assert sum(buffer.total // buffer.nbytes for buffer in buffers) == most


def test_a_program_does_not_grow_with_micro_batches_or_stages() -> None:
    def written(graph: Graph) -> int:
        return max(len(list(instructions(p))) for p in lower(graph, placed(graph)))

    assert written(_interleaved(4, 2, 100)) == written(_interleaved(4, 2, 20))
    assert written(_interleaved(16, 2, 20)) < 1.2 * written(_interleaved(4, 2, 20))
