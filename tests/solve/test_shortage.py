from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bigplan.graph.strategy import Strategy
from bigplan.solve.candidate import Candidate, Workload
from bigplan.solve.pins import parse_pins, rings_tried
from bigplan.solve.resolve import resolve
from bigplan.solve.shortage import TRIED, infeasible
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import Cluster
from bigplan.spec.hardware import with_hardware
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.training import Training

MIB = 2**20


def _workload(cluster: Cluster, micro_batch: int = 1) -> tuple[Workload, list[Candidate]]:
    training = Training(sequence_length=256, global_batch=16)
    workload = Workload(find_model("tiny-llama-demo"), training, cluster.group)
    strategies = [Strategy(dp=1, micro_batch=m) for m in (16, micro_batch)]
    return workload, [Candidate.of(workload, strategy) for strategy in strategies]


def _capped(gpu: int, host: int, nvme: int | None) -> Cluster:
    cluster = find_cluster("h200-1x")
    context = cluster.group.gpu.context_memory
    return cluster.with_caps(gpu=gpu * MIB + context, host=host * MIB, nvme=nvme)


def test_every_tier_that_would_help_is_offered_least_first() -> None:
    error = infeasible(*_workload(_capped(20, 50, 0)), ())
    assert (error.tier, error.exit_code, error.stage) == ("gpu", 3, "all")
    gpu, host = error.remedy.split("; or ")
    assert gpu == f"{error.bytes_short // MIB} MiB more memory per GPU (now 1.02 GiB)"
    assert host.endswith("more host memory per node (now 50 MiB)")


def test_the_most_frugal_strategy_is_asked() -> None:
    small, large = (
        infeasible(*_workload(_capped(5, 10**6, 0), micro_batch), ()) for micro_batch in (1, 8)
    )
    assert 0 < small.bytes_short < large.bytes_short


def test_layers_that_all_micro_batches_pass_at_once_are_asked() -> None:
    workload, _ = _workload(_capped(20, 10, 0))
    training = workload.training.model_copy(update={"optimizer": Optimizer(name="muon")})
    workload = replace(workload, training=training)
    some, every = (
        Candidate.of(workload, Strategy(dp=1, micro_batch=1, accumulation_group=group))
        for group in (2, 16)
    )
    frugal, other = (infeasible(workload, [one], ()).bytes_short for one in (every, some))
    assert 0 < frugal < other
    assert infeasible(workload, [some] * 2 * TRIED + [every], ()).bytes_short == frugal


def test_pins_may_be_short_of_two_memories_at_once() -> None:
    workload, candidates = _workload(_capped(20, 30, 0))
    pins = parse_pins({"parameters": "gpu", "gradients": "gpu", "optimizer": "host"})[1]
    error = infeasible(workload, candidates, pins)
    assert "gpu memory is" in str(error)
    assert "and host memory is" in str(error)
    found = re.fullmatch(
        r"(\d+) MiB more memory per GPU .* and (\d+) MiB more host .*", error.remedy
    )
    assert found is not None, error.remedy
    gpu, host = map(int, found.groups())
    assert error.bytes_short == max(gpu, host) * MIB
    for more, enough in (((gpu, host), True), ((gpu, 0), False), ((0, host), False)):
        grown, _ = _workload(_capped(20 + more[0], 30 + more[1], 0))
        every = [
            resolve(Candidate.of(grown, c.strategy), rings, pins)
            for c in candidates
            for rings in rings_tried(())
        ]
        assert any(every) is enough


def test_pins_that_contradict_each_other_are_short_of_nothing() -> None:
    pins = parse_pins({"parameters": "host", "optimizer": "gpu"})[1]
    error = infeasible(*_workload(_capped(100, 1000, 0)), pins)
    assert error.tier == ""
    assert "no memory, however large: decisions contradict each other" in str(error)
    assert "free a decision pinned with --set" in str(error)


def test_what_processes_alone_are_short_of_counts() -> None:
    """With so much more host memory, and no less, the plan fits."""
    small, short = find_cluster("h200-1x"), list[int]()
    for memory in (1000 * MIB, 2000 * MIB):
        nodes = with_hardware(small, {"host.memory": memory})
        short.append(infeasible(*_workload(nodes), ()).bytes_short + memory)
    assert short[0] == pytest.approx(short[1], abs=2 * MIB)
    for memory, fits in ((short[0] + MIB, True), (short[0] - 2 * MIB, False)):
        _, candidates = _workload(with_hardware(small, {"host.memory": memory}))
        found = [resolve(c, ring, ()) for c in candidates for ring in rings_tried(())]
        assert any(trial is not None for trial in found) == fits
