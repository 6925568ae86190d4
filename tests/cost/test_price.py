from __future__ import annotations

import pytest

from bigplan.cost import Costs, price
from bigplan.errors import InputError
from bigplan.graph.build import build_graph
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import NodeGroup
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


def test_capacities_leave_room_for_the_context() -> None:
    costs = _price(Strategy(dp=16))
    assert costs.ranks_per_node == 8
    assert 0 < costs.capacity[Tier.GPU] <= DGX.gpu.memory - DGX.gpu.context_memory
    assert costs.capacity[Tier.HOST] == DGX.host.memory
    assert DGX.nvme is not None
    assert costs.capacity[Tier.NVME] == DGX.nvme.node_capacity
    diskless = find_cluster("h200-1x").with_caps(nvme=0).group
    assert _price(Strategy(dp=1), diskless).capacity[Tier.NVME] == 0


def test_collectives_are_priced_for_what_is_exchanged() -> None:
    plain, sharded = (_price(Strategy(dp=16, zero=zero)).kinds["block"] for zero in (0, 3))
    assert plain.reduce == pytest.approx(2 * sharded.reduce)  # all-reduce, or half of it
    # fp32 gradients are twice the bytes of bf16 parameters.
    assert sharded.gather == pytest.approx(sharded.reduce / 2, rel=0.05)
    alone = _price(Strategy(dp=1), find_cluster("h200-1x").group).kinds["block"]
    assert (alone.reduce, alone.gather) == (0.0, 0.0)


def test_compute_scales_with_the_micro_batch() -> None:
    one, four = (_price(Strategy(dp=16, micro_batch=m)).kinds["block"] for m in (1, 4))
    # Launches and the gradient's accumulation do not grow with it.
    assert 3.5 < four.forward / one.forward <= 4.0
    assert 3.5 < four.backward / one.backward <= 4.0
    assert 1.8 < one.backward / one.forward < 3.0


def test_a_gpu_that_lacks_the_precision_is_refused() -> None:
    nodes = find_cluster("h200-1x").group
    bf16_only = nodes.gpu.model_copy(update={"peak_flops": {"bf16": 1e15}})
    with pytest.raises(InputError, match="states no peak for fp32"):
        _price(
            Strategy(dp=1),
            nodes.model_copy(update={"gpu": bf16_only}),
            TRAINING.model_copy(update={"precision": "fp32"}),
        )
