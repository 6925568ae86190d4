"""A GPU measured for seconds: figures that are possible, memory that is given back."""

import gc
import time

import pytest

pytest.importorskip("torch")

import torch

from bigplan.profile.load import Load
from bigplan.profile.machine import COLLECTIVES, HEAT, Wish
from bigplan.profile.sensors import reader, watching
from bigplan.spec.cluster import Cluster
from bigplan.spec.files.document import parse_document
from bigplan.spec.files.dump import to_yaml
from tests.profile.small import profiled

pytestmark = pytest.mark.gpu


def test_a_short_profile() -> None:
    gc.collect()  # what earlier tests left in cycles
    before = torch.cuda.memory_allocated()
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
    # cuBLAS keeps a workspace, 32 MiB on an H200, for every thread and stream that asked it for a
    # product: this thread's and autograd's here, and those of the threads that load the GPU, of
    # which four were seen in all. A product's matrices that stayed would be larger.
    assert torch.cuda.memory_allocated() - before < 5 * 2**25
    assert HEAT.name in [step.name for step in told]
    for name in ("memory_efficiency", "gemm_efficiency", "attention_forward_efficiency"):
        assert " load" in group.gpu.sources[name]
    assert parse_document(to_yaml(found.after), Cluster) == found.after


def test_the_state_under_load_is_read_where_the_driver_tells_it() -> None:
    device = torch.device("cuda", 0)
    if reader(device) is None:
        pytest.skip("no NVML here")
    load = Load(device, torch.bfloat16, 1024)
    with watching(device, 0.05) as watch:
        load.heat(1.0, time.perf_counter)
        torch.cuda.synchronize(device)
    state = watch.mean
    assert state is not None
    assert 1e8 < state.clock < 1e10
    assert 10 < state.power < 5000


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_collectives_between_gpus() -> None:
    found, told = profiled(Wish(seconds=20.0))
    link = found.after.group.intra_node
    assert COLLECTIVES.name in [step.name for step in told]
    assert 1e9 < link.bandwidth < 2e12
    assert link.beside_copies is not None
    assert "NCCL" in link.sources["bandwidth"]
    assert link.compute_beside is not None
    assert "queued at once" in link.sources["compute_beside"]
