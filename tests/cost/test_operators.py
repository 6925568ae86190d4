"""Costs operator by operator: one constructed example for every class of bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigplan.cost import price
from bigplan.cost.collective import LayerGroups
from bigplan.cost.compute import Device, operator_seconds, tile_waste
from bigplan.cost.framework import NATIVE, Framework
from bigplan.cost.operators import Bound, OperatorCost, operator_costs, traffic
from bigplan.graph.build import build_graph
from bigplan.graph.operators import Attention, Collective, Gemm, Operator, Stream
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training

NODES = find_cluster("dgx-h100").group
DEVICE = Device(NODES.gpu, "bf16")
GROUP = LayerGroups.of(Strategy(dp=1, tp=8), NODES)
FUSED = Framework("fused")


def _cost(operator: Operator, framework: Framework = FUSED) -> OperatorCost:
    (found,) = operator_costs([operator], DEVICE, GROUP, framework)
    return found


@pytest.mark.parametrize(
    ("operator", "bound"),
    [
        (Gemm("large", 4096, 4096, 4096), Bound.COMPUTE),
        (Gemm("larger", 8192, 8192, 8192), Bound.POWER),
        (Attention("long", 1e13, 1e6), Bound.COMPUTE),
        (Attention("bytes", 1.0, 1e9), Bound.MEMORY),
        (Stream("norm", 1e9), Bound.MEMORY),
        (Stream("norm of nothing", 1e3), Bound.LATENCY),
        (Stream("many kernels", 1e8, launches=1000), Bound.LATENCY),
        (Gemm("tiny", 8, 8, 8), Bound.LATENCY),
        (Collective("sum", "all_reduce", 10**9), Bound.COMMUNICATION),
        (Collective("small sum", "all_gather", 8), Bound.COMMUNICATION),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_an_operator_waits_for(operator: Operator, bound: Bound) -> None:
    assert _cost(operator).bound is bound


def test_a_slow_host_makes_kernels_wait_for_their_launches() -> None:
    stream = Stream("norm", 1e8)
    assert _cost(stream).bound is Bound.MEMORY
    assert _cost(stream, replace(FUSED, host=1000.0)).bound is Bound.LATENCY


def test_a_product_tells_its_waste() -> None:
    odd = Gemm("odd", 8192, 8192, 8190)
    cost = _cost(odd)
    assert cost.alignment < 1.0 == _cost(Gemm("even", 8192, 8192, 8192)).alignment
    partial = Gemm("partial", 8200, 8192, 8192)
    assert _cost(partial).tile_waste == tile_waste(partial, DEVICE.gpu) > 1.0


def test_a_product_tells_what_the_power_limit_adds() -> None:
    larger = Gemm("larger", 16392, 16384, 16384)  # with tiles beyond its edge
    free = replace(DEVICE, gpu=NODES.gpu.without("gemm_power_limit"))
    (unlimited,) = operator_costs([larger], free, GROUP, FUSED)
    cost = _cost(larger)
    assert cost.seconds * (1 - cost.power_lost) == pytest.approx(unlimited.seconds)
    assert cost.power_lost > 0.0 == unlimited.power_lost
    assert unlimited.bound is Bound.COMPUTE


def test_intensity_is_work_over_traffic() -> None:
    # 2 m n k over 2 bytes of each operand: for a cube of n, n / 3.
    assert _cost(Gemm("cube", 3000, 3000, 3000)).intensity == pytest.approx(1000.0)
    assert _cost(Stream("norm", 1e9)).intensity == 0.0
    assert _cost(Attention("no traffic stated", 1e9)).intensity == 0.0


def test_traffic_by_precision_and_by_what_is_one_kernel() -> None:
    gemm, fp32 = Gemm("w", 10, 20, 30), Device(NODES.gpu, "fp32")
    assert traffic(gemm, DEVICE) * 2 == traffic(gemm, fp32) == 4 * (300 + 600 + 200)
    stream, eager = Stream("norm", 100.0, eager=2.5), replace(DEVICE, eager=1.0)
    assert traffic(stream, DEVICE) == 100.0
    assert traffic(stream, eager) == 250.0
    assert next(operator_costs((stream,), eager, GROUP, FUSED)).launches == 3


def test_collectives_cost_what_the_framework_exposes() -> None:
    collective = Collective("sum", "all_reduce", 10**8, count=2)
    seconds = GROUP.seconds(collective)
    assert _cost(collective).seconds == pytest.approx(seconds)
    assert _cost(collective).nbytes == 2 * 10**8
    half = replace(FUSED, tensor_exposed=0.5)
    assert _cost(collective, half).seconds == pytest.approx(seconds / 2)
    assert _cost(replace(collective, hidden=True)).seconds == 0.0


@pytest.mark.parametrize("tp", [1, 8])
def test_operators_are_listed_in_order_and_sum_to_nearly_the_layer(tp: int) -> None:
    training = Training(sequence_length=4096, global_batch=8)
    strategy = Strategy(dp=1, tp=tp, micro_batch=tp)  # enough work that its host keeps up
    graph = build_graph(find_model("llama-3-8b"), training, strategy)
    group, cost = LayerGroups.of(strategy, NODES), price(graph, training, NODES).kinds["block"]
    for operators, seconds in (
        (graph.kinds["block"].forward, cost.forward),
        (graph.kinds["block"].backward, cost.backward),
    ):
        costs = list(operator_costs(operators, DEVICE, group, NATIVE))
        assert [c.name for c in costs] == [op.name for op in operators]
        busy = sum(c.seconds for c in costs)
        launching = seconds - busy  # what the host adds, where the GPU at times waits for it
        assert 0 <= launching <= 0.15 * seconds
        for found, operator in zip(costs, operators, strict=True):
            if not isinstance(operator, Collective):
                assert found.seconds == operator_seconds(operator, DEVICE)
