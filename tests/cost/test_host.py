from __future__ import annotations

from dataclasses import replace

import pytest

from bigplan.cost.collective import LayerGroups
from bigplan.cost.framework import FSDP, NATIVE
from bigplan.cost.host import UpdateLaunch, host_seconds, update_launch
from bigplan.cost.price import device_of, pass_cost, price
from bigplan.graph.build import build_graph
from bigplan.graph.operators import Attention, Collective, Gemm, Stream
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.training import Training

NODES = find_cluster("h200-1x").group
TRAINING = Training(sequence_length=256, global_batch=4)
DEVICE = device_of(NODES, TRAINING, NATIVE)
GPU = DEVICE.gpu
SHORT = Gemm("short", 64, 64, 64)


def test_every_operator_takes_the_python_of_one() -> None:
    one, two = (host_seconds((SHORT,) * number, DEVICE, NATIVE) for number in (1, 2))
    assert one == pytest.approx(GPU.action_overhead + GPU.operator_overhead)
    assert two - one == pytest.approx(GPU.operator_overhead)


def test_kernels_beyond_an_operators_first_are_launches() -> None:
    few, many = (Stream("sum", 1.0, launches=number) for number in (1, 17))
    more = host_seconds((many,), DEVICE, NATIVE) - host_seconds((few,), DEVICE, NATIVE)
    assert more == pytest.approx(16 * GPU.launch_overhead)


def test_fused_kernels_are_launched_from_python() -> None:
    fused, own = (Stream("norm", 1.0, eager=eager) for eager in (10.0, 1.3))
    more = host_seconds((fused,), DEVICE, NATIVE) - host_seconds((own,), DEVICE, NATIVE)
    assert more == pytest.approx(GPU.kernel_overhead)


def test_the_kernel_of_linear_biases_is_launched_from_python() -> None:
    torch, ours = (Attention("attention", 1.0, kernel=kernel) for kernel in (None, "alibi"))
    more = host_seconds((ours,), DEVICE, NATIVE) - host_seconds((torch,), DEVICE, NATIVE)
    assert more == pytest.approx(GPU.kernel_overhead)


def test_what_runs_again_is_launched_alone() -> None:
    again = host_seconds((SHORT, SHORT), DEVICE, NATIVE, again=True)
    assert again == pytest.approx(2 * GPU.launch_overhead)


def test_nothing_and_collectives_take_none() -> None:
    assert host_seconds((), DEVICE, NATIVE) == 0.0
    assert host_seconds((Collective("sum", "all_reduce", 1),), DEVICE, NATIVE) == 0.0


def test_other_frameworks_are_priced_by_launches() -> None:
    assert FSDP.host is not None
    found = host_seconds((SHORT, SHORT), DEVICE, FSDP, hooks=1.0)
    assert found == pytest.approx(3 * GPU.launch_overhead * FSDP.host)


def test_a_cpu_launches_and_computes_in_turn() -> None:
    gpu = GPU.model_copy(update={"device": "cpu"})
    cpu = device_of(NODES.model_copy(update={"gpu": gpu}), TRAINING, NATIVE)
    alone = LayerGroups.of(Strategy(dp=1), NODES)
    large = (Gemm("large", 4096, 4096, 4096),)
    host = host_seconds(large, cpu, NATIVE)
    assert (
        pass_cost(large, cpu, alone, NATIVE).seconds
        > pass_cost(large, DEVICE, alone, NATIVE).seconds
    )
    free = cpu.gpu.model_copy(update={"action_overhead": 0.0, "operator_overhead": 0.0})
    nothing = device_of(NODES.model_copy(update={"gpu": free}), TRAINING, NATIVE)
    spared = (
        pass_cost(large, cpu, alone, NATIVE).seconds
        - pass_cost(large, nothing, alone, NATIVE).seconds
    )
    assert spared == pytest.approx(host)


def test_a_narrow_layer_waits_for_the_host_and_a_wide_one_does_not() -> None:
    slow = GPU.model_copy(update={"operator_overhead": 2 * GPU.operator_overhead})
    nodes = NODES.model_copy(update={"gpu": slow})
    model = find_model("gpt2-xl")
    for batch, dearer in ((1, 1.8), (64, 1.0)):
        strategy = Strategy(dp=1, micro_batch=batch)
        training = Training(sequence_length=1024, global_batch=64)
        graph = build_graph(model, training, strategy, fused=True)
        before, after = (
            price(graph, training, group).launched().kinds["block"].forward
            for group in (NODES, nodes)
        )
        assert after / before == pytest.approx(dearer, rel=0.1)


def test_a_captured_pass_waits_for_one_launch_whatever_it_has() -> None:
    captured = replace(NATIVE, captured=True)
    for operators in ((SHORT,), (SHORT,) * 20):
        found = host_seconds(operators, DEVICE, captured)
        assert found == pytest.approx(GPU.action_overhead + GPU.launch_overhead)
        assert host_seconds(operators, DEVICE, captured, again=True) == 0.0


@pytest.mark.parametrize(("batch", "captures"), [(1, True), (64, False)])
def test_blocks_are_captured_where_launching_takes_longer(batch: int, captures: bool) -> None:
    training = Training(sequence_length=1024, global_batch=64)
    graph = build_graph(find_model("gpt2-xl"), training, Strategy(dp=1, micro_batch=batch))
    costs = price(graph, training, NODES)
    block, launched = costs.kinds["block"], costs.launched().kinds["block"]
    assert costs.captures is captures
    assert (block.forward < launched.forward) is captures
    assert not costs.launched().captures


@pytest.mark.parametrize("changes", [{"kernels": "torch"}, {"optimizer": Optimizer(name="sgd")}])
def test_an_update_by_torch_has_a_kernel_for_each_tensor_of_its_part(
    changes: dict[str, object],
) -> None:
    training = TRAINING.model_copy(update=changes)
    kind = build_graph(find_model("gpt2-xl"), training, Strategy(dp=1)).kinds["block"]
    launch = update_launch(kind.tensors, GPU, NATIVE, training)
    each, parameters = GPU.operator_overhead, kind.parameters
    assert launch.seconds(parameters) == pytest.approx(GPU.action_overhead + 16 * each)
    assert launch.seconds(parameters // 2) == pytest.approx(GPU.action_overhead + 8 * each)


def test_an_update_by_generated_kernels_is_one_graph() -> None:
    kind = build_graph(find_model("gpt2-xl"), TRAINING, Strategy(dp=1)).kinds["block"]
    expected = UpdateLaunch(GPU.action_overhead + GPU.launch_overhead)
    assert update_launch(kind.tensors, GPU, NATIVE, TRAINING) == expected
    assert update_launch(kind.tensors, GPU, FSDP, TRAINING) == UpdateLaunch()
