"""Experts of other tools, whole on each rank: bytes and elements by hand, up to step and memory."""

from __future__ import annotations

from dataclasses import replace
from math import comb

import pytest

from bigplan.cost.collective import LayerGroups, dispatch, expert_data_group, reduce_scatter
from bigplan.cost.collective import data_group as replicas_of
from bigplan.cost.framework import MEGATRON_CORE
from bigplan.cost.memory import stage_memory
from bigplan.cost.price import price
from bigplan.cost.run import PricedRun, graph_of
from bigplan.cost.step import UPDATE_BYTES, Execution, framework_step
from bigplan.graph.build import build_graph
from bigplan.graph.graph import Graph
from bigplan.graph.operators import Collective, Gemm, Stream
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.layers import BLOCK
from bigplan.spec.training import Training

QWEN = find_model("qwen3-30b-a3b")
LENGTH, EACH, HIDDEN, FFN, EXPERTS = 4096, 8, 2048, 768, 128
TRAINING = Training(sequence_length=LENGTH, global_batch=64)
NODES = find_cluster("dgx-h100").with_nodes(2).group
EXPERT = 3 * HIDDEN * FFN  # elements
LAYERS = QWEN.layers


def run(strategy: Strategy) -> PricedRun:
    return PricedRun(QWEN, TRAINING, strategy, NODES, MEGATRON_CORE, Execution())


def graph(**ways: int) -> Graph:
    return graph_of(run(Strategy(**({"zero": 1} | ways))))


def rows(found: Graph) -> list[Collective]:
    block = found.kinds[BLOCK]
    both = (*block.forward, *block.backward)
    return [one for one in both if isinstance(one, Collective) and one.rows]


def products(found: Graph) -> dict[str, Gemm]:
    block = found.kinds[BLOCK]
    both = (*block.forward, *block.backward)
    return {one.name: one for one in both if isinstance(one, Gemm)}


def test_rows_go_there_and_back_in_both_passes() -> None:
    found = rows(graph(dp=16, ep=8))
    assert [one.nbytes for one in found] == 4 * [LENGTH * EACH * HIDDEN * 2]
    assert {(one.pattern, one.rows) for one in found} == {("all_to_all", EACH)}
    assert rows(graph(dp=16)) == []


def test_tensor_parallel_ranks_send_their_own_tokens_and_gather_none_for_experts() -> None:
    found = graph(dp=8, tp=2, ep=8)
    assert [one.nbytes for one in rows(found)] == 4 * [LENGTH // 2 * EACH * HIDDEN * 2]
    block = found.kinds[BLOCK]
    names = [one.name for one in (*block.forward, *block.backward) if isinstance(one, Collective)]
    assert any("attention" in name for name in names)
    assert not any("mlp" in name for name in names)


@pytest.mark.parametrize("ways", [{"dp": 16, "ep": 8}, {"dp": 8, "tp": 2, "ep": 16}, {"dp": 16}])
def test_ranks_compute_as_much_however_experts_are_spread(ways: dict[str, int]) -> None:
    """With tp 2 a rank routes half as many tokens to experts that are twice as wide."""
    found, tp, ep = products(graph(**ways)), ways.get("tp", 1), ways.get("ep", 1)
    up, down = found["mlp up"], found["mlp down"]
    assert (up.m, up.n, up.k) == (LENGTH // tp * EACH, 2 * FFN, HIDDEN)
    assert (down.m, down.n, down.k) == (LENGTH // tp * EACH, HIDDEN, FFN)
    assert up.groups == down.groups == up.launches == EXPERTS // ep
    assert found["mlp up by weight"].results == 2 * EXPERTS // ep * HIDDEN * FFN
    assert found["router"].m == LENGTH // tp


def test_elements_of_a_rank() -> None:
    block, whole = graph(dp=16, ep=8).kinds[BLOCK], graph(dp=16).kinds[BLOCK]
    assert block.whole_experts == EXPERTS // 8 * EXPERT
    assert whole.whole_experts == EXPERTS * EXPERT
    assert block.parameters - block.whole_experts == whole.parameters - whole.whole_experts
    # With whole experts on tensor-parallel ranks, only the rest is split.
    split = graph(dp=8, tp=2, ep=8).kinds[BLOCK]
    assert split.whole_experts == block.whole_experts


def test_rows_are_kept_for_the_backward() -> None:
    """The native runtime copies them again. Tensor-parallel ranks keep a half of everything."""
    native = build_graph(QWEN, TRAINING, Strategy(dp=16)).kinds[BLOCK].saved
    found = graph(dp=16, ep=8).kinds[BLOCK].saved
    assert found == native + LENGTH * EACH * HIDDEN * 2
    assert 2 * graph(dp=8, tp=2, ep=8).kinds[BLOCK].saved == found


def test_states_are_shared_by_those_who_have_the_same_experts() -> None:
    """16 ranks share the rest, 2 share a part of the experts: 12 bytes an element of either."""
    found = graph(dp=16, ep=8)
    memory = stage_memory(found, Execution(), MEGATRON_CORE, 0)
    rest = sum(kind.parameters for kind in found.kinds.values()) - EXPERTS // 8 * EXPERT
    rest += (LAYERS - 1) * (found.kinds[BLOCK].parameters - EXPERTS // 8 * EXPERT)
    experts = LAYERS * EXPERTS // 8 * EXPERT
    assert memory["optimizer"] == pytest.approx(12 * (rest / 16 + experts / 2))
    assert memory["gradients"] == 4 * (rest + experts)
    costs = price(found, TRAINING, NODES, MEGATRON_CORE)
    parts = framework_step(found, costs, NODES, MEGATRON_CORE, Execution())
    owned = -(-rest // 16) + experts // 2
    assert parts["update"] == pytest.approx(owned * UPDATE_BYTES / costs.rates.device_memory)


def test_gradients_of_experts_are_reduced_among_those_who_have_them() -> None:
    strategy = Strategy(dp=16, ep=8, zero=1)
    found = graph_of(run(strategy))
    cost = price(found, TRAINING, NODES, MEGATRON_CORE).kinds[BLOCK]
    experts = EXPERTS // 8 * EXPERT
    rest = found.kinds[BLOCK].parameters - experts
    expected = reduce_scatter(4 * rest, replicas_of(strategy, NODES))
    expected += reduce_scatter(4 * experts, expert_data_group(strategy, NODES))
    assert cost.reduce == pytest.approx(expected)


def test_compute_waits_for_rows_unless_they_pass_beside_it() -> None:
    strategy = Strategy(dp=16, ep=16, zero=1)
    found = graph_of(run(strategy))
    sent = Collective("rows", "all_to_all", LENGTH * EACH * HIDDEN * 2, rows=EACH)
    for once in (False, True):
        framework = replace(MEGATRON_CORE, dispatches_once=once)
        cost = price(found, TRAINING, NODES, framework).kinds[BLOCK]
        took = dispatch(sent, LayerGroups.of(strategy, NODES).experts, once=once)
        assert cost.forward_waits.collectives == pytest.approx(2 * took)
        assert cost.backward_waits.collectives == pytest.approx(2 * took)
    # Beside compute their kernels take 32 of 132 multiprocessors from it, and a part is not hidden.
    beside = replace(MEGATRON_CORE, dispatches_once=True, dispatches_beside=True)
    for hidden in (1.0, 0.25):
        framework = replace(beside, dispatch_hidden=hidden)
        cost = price(found, TRAINING, NODES, framework).kinds[BLOCK]
        waited = 2 * took * (1 - hidden + hidden * 32 / 132)
        assert cost.backward_waits.collectives == pytest.approx(waited)


def test_tokens_sent_once_become_rows_where_they_come() -> None:
    """In bytes: U tokens are read and R rows written; before all-to-all rows are made and sorted,
    and in 8 bits padded."""
    rows, tokens = LENGTH * EACH * HIDDEN * 2, LENGTH * HIDDEN * 2
    eight = TRAINING.model_copy(update={"fp8_gemms": True})
    reached = 8 * (1 - comb(112, EACH) / comb(128, EACH))
    for once, pads, training, moved in (
        (True, True, TRAINING, reached * tokens + rows),
        (True, False, eight, reached * tokens + rows),
        (True, True, eight, reached * tokens + 3 * rows),
        (False, False, TRAINING, 3 * rows + tokens),
        (False, False, eight, 5 * rows + tokens),
    ):
        framework = replace(MEGATRON_CORE, dispatches_once=once, pads_rows=pads)
        one = replace(run(Strategy(dp=16, ep=8)), training=training, framework=framework)
        block = graph_of(one).kinds[BLOCK]
        streams = [x for x in (*block.forward, *block.backward) if isinstance(x, Stream)]
        copied = [x.nbytes for x in streams if x.name in ("sent", "combine")]
        assert copied == pytest.approx(4 * [moved], rel=1e-6)


@pytest.mark.parametrize(
    ("once", "ahead", "back"), [(False, 12, 16), (True, 28, 40)], ids=["all-to-all", "once"]
)
def test_biases_of_what_experts_give_are_added_by_expert(once: bool, ahead: int, back: int) -> None:
    """First ones by the product. The rest in bf16, or in fp32 where weights are, by element."""
    model = find_model("gpt-oss-120b")
    framework = replace(MEGATRON_CORE, dispatches_once=once)
    strategy = Strategy(dp=16, ep=8)
    one = PricedRun(model, TRAINING, strategy, NODES, framework, Execution())
    block = graph_of(one).kinds[BLOCK]
    given = LENGTH * model.experts_per_token * model.hidden
    for operators, each, launches in ((block.forward, ahead, 3), (block.backward, back, 6)):
        biases = [x for x in operators if x.name.startswith("biases of")]
        assert [x.name for x in biases] == ["biases of mlp down"]
        assert isinstance(biases[0], Stream)
        assert (biases[0].nbytes, biases[0].launches) == (each * given, launches * 16)
