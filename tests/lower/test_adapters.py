"""What a rank does with adapters of frozen layers."""

from __future__ import annotations

import pytest

from bigplan.content import ADAPTERS
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.program import Action, Op, Program, expand
from bigplan.verify import verify
from tests.toys import COSTS, ROOMY, toy_graph


def _placed(graph: Graph, tier: Tier = Tier.GPU) -> Placement:
    stages = []
    for stage in range(graph.strategy.pp):
        names = [graph.layers[layer] for layer in graph.stage_layers(stage)]
        kinds = {
            name: KindPlacement(
                layers=names.count(name),
                parameters={tier: names.count(name)},
                activations={Recompute.NONE: {Tier.GPU: names.count(name)}},
            )
            for name in dict.fromkeys(names)
        }
        stages.append(StagePlacement(kinds=kinds))
    return Placement(stages=tuple(stages))


def _programs(graph: Graph, tier: Tier = Tier.GPU) -> tuple[Program, ...]:
    programs = lower(graph, _placed(graph, tier))
    verify(programs, graph, ROOMY, COSTS.sharing)
    return programs


def _ops(program: Program, *ops: Op) -> list[Action]:
    return [action for action in expand(program.step) if action.op in ops]


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_step_sums_and_updates_adapters_once(deferred: bool, zero: int) -> None:
    strategy = Strategy(dp=2, tp=2, pp=2, zero=zero)
    for program in _programs(toy_graph(strategy, deferred=deferred, frozen=True)):
        once = (Op.TENSOR_REDUCE, Op.REDUCE, Op.NORM, Op.UPDATE)
        found = _ops(program, *once)
        assert {action.layer for action in found} == {ADAPTERS}
        ordered = [action.op for action in found]
        if deferred:  # the update is that of the step before
            assert ordered == [Op.UPDATE, Op.TENSOR_REDUCE, Op.REDUCE, Op.NORM]
            assert [a.op for a in expand(program.flush)] == [Op.UPDATE, Op.FREE]
        else:
            assert ordered == [Op.TENSOR_REDUCE, Op.REDUCE, Op.UPDATE]


def test_the_first_backward_alone_begins_the_sum() -> None:
    (program,) = _programs(toy_graph(Strategy(dp=1, accumulation_group=2), frozen=True))
    backward = [a for a in _ops(program, Op.BACKWARD) if 1 <= a.layer <= 4]
    adds = ["g.adapters" in {ref.buffer for ref in a.reads} for a in backward]
    assert adds == [False] + [True] * (len(backward) - 1)
    assert all("g.adapters" in {ref.buffer for ref in a.writes} for a in backward)


def test_frozen_layers_have_no_gradients_and_no_state() -> None:
    (program,) = _programs(toy_graph(frozen=True), Tier.HOST)
    names = set(program.buffers)
    assert {"w.adapters", "g.adapters", "o.adapters", "n.adapters", "w1", "slot.block"} <= names
    assert not {name for name in names if name[0] in "gon" and name[1:2].isdigit()}
    assert not {name for name in names if name.startswith(("sum", "stage.g"))}
    moved = {a.op for a in expand(program.step)} & {Op.GRAD_OUT, Op.PARAM_OUT, Op.STATE_IN}
    assert not moved


def test_a_frozen_table_comes_for_the_forward_alone() -> None:
    (program,) = _programs(toy_graph(frozen=True, units=1), Tier.HOST)
    loads = [action.layer for action in _ops(program, Op.LOAD)]
    assert loads.count(0) == 1
    assert loads.count(1) + loads.count(2) > 2
    (idle,) = (a for a in _ops(program, Op.BACKWARD) if a.layer == 0)
    assert not idle.writes


def test_a_lent_table_comes_back_without_gradients() -> None:
    first, last = _programs(toy_graph(Strategy(dp=1, pp=2), tied=True, frozen=True))
    assert "g0.back" not in first.buffers
    assert "g0" not in last.buffers
    assert [a.layer for a in _ops(first, Op.SEND)].count(0) >= 1


def test_checkpoints_hold_adapters_alone() -> None:
    (program,) = _programs(toy_graph(frozen=True, master=False))
    saved = [action.reads[0].buffer for action in expand(program.save)]
    assert saved == ["w.adapters", "o.adapters"]
