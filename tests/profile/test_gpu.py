"""A GPU measured for seconds: figures that are possible, memory that is given back."""

import pytest

pytest.importorskip("torch")

import torch

from bigplan.profile.machine import Wish
from bigplan.spec.cluster import Cluster
from bigplan.spec.document import parse_document
from bigplan.spec.dump import to_yaml
from tests.profile.small import profiled

pytestmark = pytest.mark.gpu


def test_a_short_profile() -> None:
    found, told = profiled(Wish(seconds=5.0))
    group = found.after.group
    assert group.gpu.device == "cuda"
    assert group.gpus_per_node == torch.cuda.device_count()
    assert 0.2 < group.gpu.gemm_efficiency <= 1
    assert 0.2 < group.gpu.memory_efficiency <= 1
    assert 0.05 < group.gpu.attention_forward_efficiency["sdpa"] < 1
    assert 1e-6 < group.gpu.launch_overhead < 1e-4
    assert 2**25 < group.gpu.context_memory < 2**32
    assert group.gpu.memory > 2**32
    assert group.pcie.both_ways is not None
    # Full duplex at best, and never slower than the slower direction alone.
    alone = group.pcie.host_to_device, group.pcie.device_to_host
    assert 0.8 * min(alone) < group.pcie.both_ways < 1.1 * sum(alone)
    assert all("measured" in source for source in group.pcie.sources.values())
    assert torch.cuda.memory_allocated() < 2**27  # cuBLAS keeps its workspace
    assert len(told) >= 8
    assert parse_document(to_yaml(found.after), Cluster) == found.after
