from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.cost import Costs, price
from bigplan.cost.collective import LayerGroups, message
from bigplan.cost.compute import operator_seconds
from bigplan.cost.costs import NOT_SLOWED, Slowed
from bigplan.cost.framework import (
    DEEPSPEED,
    FSDP,
    MEGATRON,
    NATIVE,
    Framework,
)
from bigplan.cost.price import (
    COLLECTIVE_LAUNCHES,
    OVERLAP_NORM,
    device_of,
    memory_of_torch,
    pass_cost,
)
from bigplan.cost.process import locked_bytes
from bigplan.cost.rates import INTO_BESIDE_UPDATE, OFF_BESIDE_UPDATE
from bigplan.errors import InputError
from bigplan.graph.build import build_graph
from bigplan.graph.graph import Recompute
from bigplan.graph.operators import Attention, Collective, Gemm, Stream
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.training import Training

MODEL = find_model("llama-3-8b")
TRAINING = Training(sequence_length=4096, global_batch=64)
DGX = find_cluster("dgx-h100").with_nodes(2).group


def _price(strategy: Strategy, nodes: NodeGroup = DGX, training: Training = TRAINING) -> Costs:
    return price(build_graph(MODEL, training, strategy), training, nodes)


def test_the_ranks_of_a_node_share_its_resources() -> None:
    rates = _price(Strategy(dp=16)).rates
    assert rates.h2d == min(DGX.pcie.host_to_device, DGX.pcie.node_host_to_device / 8)
    assert rates.d2h == min(DGX.pcie.device_to_host, DGX.pcie.node_device_to_host / 8)
    assert DGX.nvme is not None
    assert rates.nvme_read * 8 == pytest.approx(DGX.nvme.node_read)
    assert rates.nvme_write * 8 == pytest.approx(DGX.nvme.node_write)
    assert rates.host_memory * 8 == pytest.approx(DGX.host.memory_bandwidth)
    assert rates.cpu_update * 8 <= DGX.host.adam_rate
    assert rates.gpu_update == DGX.gpu.adam_rate
    assert rates.latency == DGX.pcie.latency


def test_updates_are_priced_by_the_bytes_of_their_optimizer() -> None:
    """Rates are AdamW's, which moves 30 bytes; momentum 22, plain SGD 14."""
    adam = _price(Strategy(dp=8)).rates
    for momentum, nbytes in ((0.9, 22), (0.0, 14)):
        optimizer = Optimizer(name="sgd", momentum=momentum)
        rates = _price(
            Strategy(dp=8), training=TRAINING.model_copy(update={"optimizer": optimizer})
        ).rates
        for name in ("gpu_update", "cpu_update"):
            assert getattr(rates, name) * nbytes == pytest.approx(getattr(adam, name) * 30)


@given(*[st.floats(1e8, 1e10)] * 3)
def test_reads_and_writes_share_what_a_drive_does_at_once(
    read: float, write: float, both: float
) -> None:
    assert DGX.nvme is not None
    rates = {"read": read, "write": write, "both_ways": both}
    drives = DGX.nvme.model_copy(update=rates)
    found = _price(Strategy(dp=8), nodes=DGX.model_copy(update={"nvme": drives})).rates
    for one, alone in ((found.nvme_read, read), (found.nvme_write, write)):
        assert one * 8 == pytest.approx(min(alone, both / 2) * drives.drives)


def test_capacities_leave_room_for_the_context() -> None:
    costs = _price(Strategy(dp=16))
    assert costs.sharing.ranks == 8
    assert 0 < costs.capacity[Tier.GPU] <= DGX.gpu.memory - DGX.gpu.context_memory
    tensors = costs.capacity[Tier.HOST]
    whole = tensors + locked_bytes(DGX, tensors) + costs.processes
    assert whole == pytest.approx(DGX.host.memory, rel=1e-3)
    assert DGX.nvme is not None
    assert costs.capacity[Tier.NVME] == DGX.nvme.node_capacity
    diskless = find_cluster("h200-1x").with_caps(nvme=0).group
    assert _price(Strategy(dp=1), diskless).capacity[Tier.NVME] == 0


def test_state_passes_through_the_gpu_each_way_at_a_rate_of_its_own() -> None:
    def passing(into: float | None, off: float | None) -> tuple[float, float]:
        measured = {
            "node_host_to_device_beside_update": into,
            "node_device_to_host_beside_update": off,
        }
        nodes = DGX.model_copy(update={"pcie": DGX.pcie.model_copy(update=measured)})
        rates = _price(Strategy(dp=8), nodes).rates
        return rates.state_in / rates.h2d, rates.state_out / rates.d2h

    pcie = DGX.pcie
    half = 4 * min(pcie.host_to_device, pcie.node_host_to_device / 8)
    third = 8 / 3 * min(pcie.device_to_host, pcie.node_device_to_host / 8)
    assert passing(half, third) == pytest.approx((1 / 2, 1 / 3))
    assert passing(1e18, 1e18) == (1, 1)  # what a copy alone reaches
    assert passing(None, None) == pytest.approx((INTO_BESIDE_UPDATE, OFF_BESIDE_UPDATE))


def test_collectives_are_priced_for_what_is_exchanged() -> None:
    plain, sharded = (_price(Strategy(dp=16, zero=zero)).kinds["block"] for zero in (0, 3))
    assert plain.reduce == pytest.approx(2 * sharded.reduce)  # all-reduce, or half of it
    # fp32 gradients are twice the bytes of bf16 parameters.
    assert sharded.gather == pytest.approx(sharded.reduce / 2, rel=0.05)
    alone = _price(Strategy(dp=1), find_cluster("h200-1x").group).kinds["block"]
    assert (alone.reduce, alone.gather) == (0.0, 0.0)


def test_compute_grows_by_the_same_for_every_sequence() -> None:
    """What does not grow: launches, weights that are read, and the gradient's accumulation."""
    one, two, four = (_price(Strategy(dp=16, micro_batch=m)).kinds["block"] for m in (1, 2, 4))
    for a, b, c in (
        (one.forward, two.forward, four.forward),
        (one.backward, two.backward, four.backward),
    ):
        # Where the host launches nearly as long, a norm of both is no sum, and four sequences'
        # products are at the power limit, one's are not.
        assert (c - b) == pytest.approx(2 * (b - a), rel=0.03)
        assert 0 <= (2 * a - b) / a < 0.25  # fixed part of a micro-batch of 4,096 tokens
    assert 1.8 < one.backward / one.forward < 3.0
    # Adding up gradients is in the backward only: two passes over fp32 and, in plain torch
    # kernels, the product's read.
    block = build_graph(MODEL, TRAINING, Strategy(dp=16)).kinds["block"]
    device = device_of(DGX, TRAINING, NATIVE)
    assert 2 * one.backward - two.backward >= 10 * block.parameters / device.stream_rate


# --- passes: GPU, host and collectives together

DEVICE = device_of(DGX, TRAINING, NATIVE)
ALONE = LayerGroups.of(Strategy(dp=1), DGX)
EIGHT = LayerGroups.of(Strategy(dp=1, tp=8), DGX)
FUSED = Framework("fused")
LAUNCH = DEVICE.gpu.launch_overhead


def test_a_pass_without_a_host_is_the_sum_of_its_operators() -> None:
    no_host = replace(FUSED, host=0.0)
    operators = (Gemm("w", 4096, 4096, 4096), Stream("norm", 1e9), Attention("attention", 1e12))
    busy = sum(operator_seconds(operator, DEVICE) for operator in operators)
    assert pass_cost(operators, DEVICE, ALONE, no_host).seconds == pytest.approx(busy)


@given(st.integers(1, 3000), st.floats(1e3, 1e11))
def test_a_pass_is_at_least_each_part_and_at_most_their_sum(number: int, nbytes: float) -> None:
    stream = Stream("norm", nbytes, launches=number)
    busy, host = nbytes / DEVICE.stream_rate, number * LAUNCH
    found = pass_cost((stream,), DEVICE, ALONE, FUSED).seconds
    assert max(busy, host) * (1 - 1e-12) <= found <= (busy + host) * (1 + 1e-12)


def test_the_host_and_the_gpu_wait_for_each_other_where_they_are_close() -> None:
    nbytes = 100 * LAUNCH * DEVICE.stream_rate
    even = pass_cost((Stream("norm", nbytes, launches=100),), DEVICE, ALONE, FUSED).seconds
    assert even == pytest.approx(100 * LAUNCH * 2 ** (1 / OVERLAP_NORM))
    idle = pass_cost((Stream("norm", nbytes, launches=1),), DEVICE, ALONE, FUSED).seconds
    assert idle == pytest.approx(100 * LAUNCH)  # one launch in a hundred does not show


def test_launching_costs_what_the_framework_makes_of_it() -> None:
    tiny = (Stream("norm", 1.0, launches=7),)
    assert pass_cost(tiny, DEVICE, ALONE, FUSED).seconds == pytest.approx(7 * LAUNCH)
    slow = replace(FUSED, host=3.0)
    assert pass_cost(tiny, DEVICE, ALONE, slow).seconds == pytest.approx(3 * 7 * LAUNCH)
    assert pass_cost(tiny, DEVICE, ALONE, FUSED, hooks=5.0).seconds == pytest.approx(12 * LAUNCH)


def test_eager_frameworks_move_more_and_launch_more() -> None:
    stream = (Stream("norm", 1e9, launches=2, eager=3.0),)
    eager = replace(DEVICE, eager=1.0)
    ratio = (
        pass_cost(stream, eager, ALONE, FUSED).seconds
        / pass_cost(stream, DEVICE, ALONE, FUSED).seconds
    )
    assert ratio == pytest.approx(3.0)


def test_collectives_are_waited_for_as_far_as_they_are_exposed() -> None:
    collective = Collective("sum", "all_reduce", 10**9)
    seconds = EIGHT.seconds(collective)
    busy = (Stream("norm", 1e12),)
    alone = pass_cost(busy, DEVICE, EIGHT, FUSED).seconds
    for share in (0.0, 0.5, 1.0):
        framework = replace(FUSED, tensor_exposed=share)
        found = pass_cost((*busy, collective), DEVICE, EIGHT, framework).seconds
        assert found - alone == pytest.approx(share * seconds)
    hidden = replace(collective, hidden=True)
    assert pass_cost((*busy, hidden), DEVICE, EIGHT, FUSED).seconds == pytest.approx(alone)
    cpu = replace(DEVICE, gpu=DEVICE.gpu.model_copy(update={"device": "cpu"}))
    waits = pass_cost((*busy, hidden), cpu, EIGHT, FUSED).waits
    assert waits.collectives == pytest.approx(seconds)


def test_a_product_hides_as_much_of_a_collective_as_it_takes_itself() -> None:
    beside = replace(FUSED, beside_weights=True)
    product = Gemm("up by weight", 4096, 4096, 4096)
    took = operator_seconds(product, DEVICE)
    for nbytes in (10**6, 10**9):  # less and more than the product takes
        collective = Collective("sum", "all_reduce", nbytes, beside="up by weight")
        seconds = EIGHT.seconds(collective)
        assert (seconds < took) == (nbytes == 10**6)
        waits, hides = (
            pass_cost((collective, product), DEVICE, EIGHT, f).seconds for f in (FUSED, beside)
        )
        assert waits == pytest.approx(took + seconds)
        assert hides == pytest.approx(max(took, seconds))
        other = replace(product, name="down by weight")
        assert pass_cost((collective, other), DEVICE, EIGHT, beside).seconds == pytest.approx(waits)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_sums_of_input_gradients_run_beside_a_product_of_their_pass(
    sequence_parallel: bool,
) -> None:
    strategy = Strategy(dp=2, tp=8, sequence_parallel=sequence_parallel)
    kinds = build_graph(MODEL, TRAINING, strategy).kinds
    for name, sums in (("block", 2), ("head", 1)):
        backward = kinds[name].backward
        beside = [op.beside for op in backward if isinstance(op, Collective) and op.beside]
        assert len(beside) == sums
        assert set(beside) <= {op.name for op in backward if isinstance(op, Gemm)}
        forward = kinds[name].forward
        assert not [op for op in forward if isinstance(op, Collective) and op.beside]


def test_launching_a_collective_costs_less_than_a_kernel_and_nothing_alone() -> None:
    collective = Collective("sum", "all_reduce", 1, count=10)
    unexposed = replace(FUSED, tensor_exposed=0.0)
    found = pass_cost((collective,), DEVICE, EIGHT, unexposed).seconds
    assert found == pytest.approx(10 * COLLECTIVE_LAUNCHES * LAUNCH)
    assert COLLECTIVE_LAUNCHES < 1
    assert pass_cost((collective,), DEVICE, ALONE, FUSED).seconds == 0.0


def test_gathered_layers_cost_host_work_per_tensor_in_zero_3_only() -> None:
    hooked = replace(DEEPSPEED, gather_launches=1e5)
    none = replace(DEEPSPEED, gather_launches=0.0)
    for zero, dearer in ((1, False), (3, True)):
        graph = build_graph(MODEL, TRAINING, Strategy(dp=16, zero=zero))
        with_hooks, without = (
            price(graph, TRAINING, DGX, f).kinds["block"].forward for f in (hooked, none)
        )
        assert (with_hooks > without) == dearer


def test_early_zero_1_reduces_all_gradients_to_every_rank() -> None:
    graph = build_graph(MODEL, TRAINING, Strategy(dp=16, zero=1))
    early, late = (price(graph, TRAINING, DGX, f).kinds["block"].reduce for f in (MEGATRON, FSDP))
    assert early == pytest.approx(2 * late, rel=0.01)


def test_gradients_are_reduced_in_the_precision_asked_for() -> None:
    low = TRAINING.model_copy(update={"reduce_precision": "bf16"})
    full, half = (_price(Strategy(dp=16), DGX, t).kinds["block"].reduce for t in (TRAINING, low))
    assert 1.9 < full / half < 2.0  # latency, and smaller messages are slower


def test_recomputation_runs_more_of_the_forward_again_the_less_is_kept() -> None:
    cost = _price(Strategy(dp=16)).kinds["block"]
    again = [cost.again(recompute) for recompute in Recompute]
    assert again[0] == 0.0
    assert again == sorted(again)
    assert 0 < again[1] < again[2] < again[3] < cost.forward


def test_frameworks_that_do_not_stop_early_run_all_of_the_forward_again() -> None:
    strategy = Strategy(dp=16)
    cost = price(build_graph(MODEL, TRAINING, strategy), TRAINING, DGX, MEGATRON).kinds["block"]
    assert cost.again(Recompute.FULL) == cost.forward


def test_a_gpu_that_lacks_the_precision_is_refused() -> None:
    nodes = find_cluster("h200-1x").group
    bf16_only = nodes.gpu.model_copy(update={"peak_flops": {"bf16": 1e15}})
    with pytest.raises(InputError, match="states no peak for fp32"):
        _price(
            Strategy(dp=1),
            nodes.model_copy(update={"gpu": bf16_only}),
            TRAINING.model_copy(update={"precision": "fp32"}),
        )


def test_compute_loses_to_kernels_of_collectives() -> None:
    gpu = DGX.gpu.model_copy(update={"compute_beside_collectives": 0.75})
    link = DGX.intra_node.model_copy(update={"peer_access": False})
    nodes = DGX.model_copy(update={"nodes": 1, "gpu": gpu, "intra_node": link})
    alone = _price(Strategy(dp=1, micro_batch=2), nodes).kinds["block"]

    def slowed(**strategy: int) -> tuple[Slowed, float, float]:
        """What a block's passes lose, and what they would beside one gather, and one reduction."""
        found = _price(Strategy(dp=8, micro_batch=2, **strategy), nodes).kinds["block"]
        assert found.forward == pytest.approx(alone.forward + found.slowed.forward)
        assert found.backward == pytest.approx(alone.backward + found.slowed.backward)
        return found.slowed, 0.25 * found.gather, 0.25 * found.reduce

    # Of 4 micro-batches. Without ZeRO all is reduced once a step; ZeRO 3 gathers for each pass.
    found, gather, reduction = slowed(zero=0)
    assert found == pytest.approx((0, reduction / 4))
    assert gather > 0
    found, gather, reduction = slowed(zero=1)
    assert found == pytest.approx((gather / 4, reduction / 4))
    found, gather, reduction = slowed(zero=2)
    assert found == pytest.approx((gather / 4, reduction))
    found, gather, reduction = slowed(zero=3)
    assert found == pytest.approx((gather, gather + reduction))
    found, gather, reduction = slowed(zero=3, accumulation_group=2)
    assert found == pytest.approx((gather / 2, (gather + reduction) / 2))


def test_gathers_by_copy_engines_take_a_copy_of_the_own_part() -> None:
    assert DGX.intra_node.peer_access
    one = DGX.model_copy(update={"nodes": 1})
    graph = build_graph(MODEL, TRAINING, Strategy(dp=8, micro_batch=2, zero=3))
    block = graph.kinds["block"]
    found = price(graph, TRAINING, one).kinds["block"]
    copied = 2 * block.parameters * graph.sizes.parameter / 8  # read and written
    gpu = one.gpu
    assert found.taken.gather == pytest.approx(
        copied / (gpu.memory_bandwidth * gpu.memory_efficiency)
    )
    # Compute slows kernels, and so reductions, but no engines.
    link = one.intra_node.model_copy(update={"beside_compute": 0.5})
    slower = price(graph, TRAINING, one.model_copy(update={"intra_node": link})).kinds["block"]
    assert (slower.gather, slower.reduce) == (found.gather, 2 * found.reduce)
    # Between nodes kernels gather.
    assert gpu.compute_beside_collectives == 0.78
    across = _price(Strategy(dp=16, micro_batch=2, zero=3), DGX).kinds["block"]
    assert across.taken.gather == pytest.approx(0.22 * across.gather)


def test_where_the_gpu_says_nothing_its_link_does() -> None:
    """Half of the speed is twice the seconds; of those compute loses a tenth, once a step."""
    shares = {"beside_compute": 0.5, "compute_beside": 0.9}
    kernels = DGX.intra_node.model_copy(update={"peer_access": False})
    link = kernels.model_copy(update=shares)
    gpu = DGX.gpu.model_copy(update={"compute_beside_collectives": None})
    usual = DGX.model_copy(update={"nodes": 1, "gpu": gpu, "intra_node": kernels})
    slower = usual.model_copy(update={"intra_node": link})
    strategy = Strategy(dp=8, micro_batch=2)  # 4 micro-batches a step
    before, beside = (_price(strategy, nodes).kinds["block"] for nodes in (usual, slower))
    assert (beside.reduce, beside.gather) == (2 * before.reduce, 2 * before.gather)
    assert before.slowed == NOT_SLOWED
    assert beside.slowed == pytest.approx((0, 0.1 * beside.reduce / 4))
    assert beside.forward == before.forward
    assert beside.backward == pytest.approx(before.backward + beside.slowed.backward)


def test_frameworks_with_fitted_shares_lose_nothing_more() -> None:
    graph = build_graph(MODEL, TRAINING, Strategy(dp=8, micro_batch=2, zero=3))
    assert price(graph, TRAINING, DGX, FSDP).kinds["block"].slowed == NOT_SLOWED


def test_communicators_take_memory_of_gpus_alone() -> None:
    gpu = find_cluster("dgx-h100").group.gpu
    free = gpu.memory - gpu.context_memory
    counts = {
        Strategy(dp=1): 0,
        Strategy(dp=2, zero=3): 1,
        Strategy(dp=2, tp=2): 2,
        Strategy(dp=1, pp=2): 2,  # one each way
        Strategy(dp=2, pp=4): 5,
        Strategy(dp=1, pp=2, vpp=2): 4,  # the last stage sends to the first, too
    }
    for strategy, count in counts.items():
        assert memory_of_torch(gpu, strategy) == free - count * gpu.communicator_memory
        cpu = gpu.model_copy(update={"device": "cpu"})
        assert memory_of_torch(cpu, strategy, 1 << 40) == free


@pytest.mark.parametrize(
    ("strategy", "count"),
    [
        (Strategy(dp=1, pp=2), 4),
        (Strategy(dp=1, pp=4), 4),  # between the ends; the others have neighbours on both sides
        (Strategy(dp=1, pp=4, vpp=2), 6),
    ],
)
def test_a_lent_table_has_communicators_of_its_own(strategy: Strategy, count: int) -> None:
    gpu = find_cluster("dgx-h100").group.gpu
    free = gpu.memory - gpu.context_memory
    allowed = memory_of_torch(gpu, strategy, lends_table=True)
    assert allowed == free - count * gpu.communicator_memory


def test_a_lent_table_is_priced_by_its_bytes() -> None:
    nodes = find_cluster("dgx-h100").group
    training = Training(sequence_length=2048, global_batch=16)
    model = find_model("gpt2-xl").model_copy(update={"max_sequence_length": 2048})
    strategy = Strategy(dp=1, pp=2, tp=2)
    lent, back = price(build_graph(model, training, strategy), training, nodes).table
    half = build_graph(model, training, strategy).kinds["embedding"].parameters
    assert (lent, back) == (
        message(2 * half, nodes.intra_node),
        message(4 * half, nodes.intra_node),
    )
    for other in (Strategy(dp=4), Strategy(dp=1, pp=2, tp=2)):
        untied = model.model_copy(update={"tied_embeddings": other.pp == 1})
        graph = build_graph(untied, training, other)
        assert price(graph, training, nodes).table == (0.0, 0.0)


def test_a_gpu_has_page_tables_of_what_it_page_locks() -> None:
    """8 bytes a page of 4 KiB, none for a CPU that stands in for a GPU."""
    gpu = find_cluster("dgx-h100").group.gpu
    alone = memory_of_torch(gpu, Strategy(dp=1))
    assert memory_of_torch(gpu, Strategy(dp=1), 100 << 30) == alone - (200 << 20)
    costs = _price(Strategy(dp=8, micro_batch=2))
    beside = costs.beside(100 << 30)
    assert costs.capacity[Tier.GPU] - beside[Tier.GPU] == 200 << 20
    assert beside[Tier.HOST] == costs.capacity[Tier.HOST]
    cpu = DGX.model_copy(update={"gpu": gpu.model_copy(update={"device": "cpu"})})
    costs = _price(Strategy(dp=8, micro_batch=2), cpu)
    assert costs.beside(100 << 30) == costs.capacity
