from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from bigplan.errors import InputError
from bigplan.planner import Request, make_plan
from bigplan.profile import attention, gemm, load, machine, stream
from bigplan.profile import bench as bench_module
from bigplan.profile.bench import Bench
from bigplan.profile.host import measure_device_update
from bigplan.profile.load import Load
from bigplan.profile.machine import COLLECTIVES, COMPUTE, DRIVE, HEAT, PROBES, Probe, Wish
from bigplan.profile.memory import Use
from bigplan.profile.peers import Peers
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.detect.cluster import detect
from bigplan.spec.detect.machine import FoundGpu
from bigplan.spec.files.document import parse_document
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.training import Training
from tests.profile.clock import FakeClock
from tests.profile.small import bench, profiled, shrink
from tests.wording import tells

BLOCKS = ("gpu", "host", "pcie", "nvme", "intra_node")
# What only names, counts, or stands for itself on a CPU.
UNMEASURED = {
    "gpu": {"memory", "multiprocessors", "context_memory"},
    "host": {"memory"},
    "pcie": set[str](),
    "nvme": {"capacity", "drives"},
    "intra_node": set[str](),
}


@pytest.mark.usefixtures("first_plans")
def test_a_cpu_profile_measures_everything_and_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)
    found, told = profiled(Wish("mine", tmp_path, cpu_devices=2, seconds=0.5))
    probes = [probe for probe in (*PROBES, COLLECTIVES, DRIVE) if probe is not HEAT]
    assert [step.name for step in told] == [probe.name for probe in probes]
    assert list(tmp_path.iterdir()) == []  # the drive's file is gone
    group = found.after.group
    for name in BLOCKS:
        block = getattr(group, name)
        for field, source in block.sources.items():
            measured = "by bigplan profile: " in source
            assert measured != (field in UNMEASURED[name]), (name, field, source)
    for field in ("adam_rate", "adam_rate_beside_copies"):
        assert "and their bf16 copy" in group.host.sources[field]
    assert group.nvme is not None
    assert group.nvme.path == str(tmp_path)
    assert (found.after.name, group.gpus_per_node) == ("mine", 2)
    assert parse_document(to_yaml(found.after), Cluster) == found.after
    training = Training(sequence_length=256, global_batch=8, precision="fp32")
    plan = make_plan(Request(find_model("tiny-llama-demo"), training, found.after))
    assert plan.predicted.step_seconds > 0


def test_without_a_folder_nothing_goes_to_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "PROBES", ())
    found, told = profiled(Wish(cpu_devices=1))
    assert found.after.group.nvme is None
    assert told == []


def test_probes_share_the_time_by_weight() -> None:
    clock, given = FakeClock(), []

    def probe(group: NodeGroup, _: object, seconds: float) -> NodeGroup:
        given.append(seconds)
        clock.work(seconds)
        return group

    probes = [machine.Probe(name, weight, probe) for name, weight in (("a", 1), ("b", 3))]
    group = find_cluster("h200-1x").group
    steps = list(machine._measured(probes, group, bench(clock=clock), 40.0))
    assert given == pytest.approx([10.0, 30.0])
    assert [step.seconds for step in steps] == pytest.approx(given)


def test_what_is_measured_hot_comes_right_after_heating() -> None:
    """Between them the GPU would cool; and copies are not to wait for rounds of load."""
    hot = [probe.hot for probe in PROBES]
    assert hot.index(True) == PROBES.index(HEAT)
    assert hot == sorted(hot[: len(COMPUTE)]) + [False] * (len(PROBES) - len(COMPUTE))


def test_only_hot_probes_get_the_load() -> None:
    seen: list[bool] = []

    def probe(group: NodeGroup, given: Bench, _: float) -> NodeGroup:
        seen.append(given.load is not None)
        return group

    given = bench(load=Load(torch.device("cpu"), torch.float32, 256))
    probes = [machine.Probe("a", 1, probe), machine.Probe("b", 1, probe, hot=True)]
    list(machine._measured(probes, find_cluster("h200-1x").group, given, 1.0))
    assert seen == [False, True]


class StandIn(Bench):
    """A bench that takes its CPU for a GPU."""

    @property
    def cuda(self) -> bool:
        return True

    def device_memory(self) -> int:
        return 2**22


@dataclass
class Moment:
    """A CUDA event where all work is done at once."""

    at: float = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at

    def elapsed_time(self, later: Moment) -> float:
        return 1e3 * (later.at - self.at)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """With a load, and probes of toy size."""
    sizes = {"HIDDEN": 32, "FFN": 48, "HEADS": 4, "KEY_VALUE_HEADS": 2, "HEAD": 8, "LONGEST": 16}
    for name, size in sizes.items():
        monkeypatch.setattr(load, name, size)
    for module in (load, bench_module):
        monkeypatch.setattr(module, "event", Moment)
    monkeypatch.setattr(load, "settled", lambda rates: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(stream, "GPU_BYTES", 2**20)
    layers = ((64, 64, 64), (64, 96, 32))  # two are measured however slow the machine is
    monkeypatch.setattr(gemm, "GPU_LAYERS", layers)
    monkeypatch.setattr(gemm, "OTHERS", layers[:1])
    monkeypatch.setattr(gemm, "LAUNCHES", 0)
    monkeypatch.setattr(attention, "GPU_CASES", ((1, 64, 4), (2, 32, 4)))
    hot = Load(torch.device("cpu"), torch.float32, 32)
    return StandIn((torch.device("cpu"),), 2, 1, load=hot)


def test_what_a_gpu_does_is_measured_under_load_and_said_to_be(stand_in: StandIn) -> None:
    steps = list(machine._measured(COMPUTE, find_cluster("h200-1x").group, stand_in, 1.0))
    assert [step.name for step in steps] == [probe.name for probe in COMPUTE]
    gpu = steps[-1].after.gpu
    for name in ("memory_efficiency", "gemm_efficiency", "gemm_efficiencies", "gemm_half_k"):
        assert gpu.sources[name].endswith(", under sustained load"), name
    assert ", bf16, under sustained load; flash1" in gpu.sources["attention_backward_efficiency"]
    assert "load" not in gpu.sources["launch_overhead"]
    for way in ("6 products in bf16", "(forward ", ", by input ", ", by weight "):
        assert way in gpu.sources["gemm_efficiency"]


def test_no_probe_leaves_tensors_behind(stand_in: StandIn) -> None:
    """Neither with something that outlives it nor in cycles, which wait for the collector."""
    probes = (*COMPUTE, Probe("AdamW on the device", 1, measure_device_update))
    group = find_cluster("h200-1x").group
    list(machine._measured(probes, group, stand_in, 0.1))  # what is made once for all is made
    assert stand_in.load is not None
    stand_in.load._round = None
    gc.collect()
    gc.disable()
    try:
        before = _tensors()
        list(machine._measured(probes, group, stand_in, 0.1))
        assert _tensors() > before  # the load's, while there is a load
        stand_in.load._round = None
        assert _tensors() == before
    finally:
        gc.enable()


def _tensors() -> int:
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def test_a_device_is_measured_while_the_others_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training; on the cores that are left, and not by the first, which is measured."""
    told: list[tuple[str, tuple[int, ...]]] = []

    class Recorded(Peers):
        def __init__(self, number: int) -> None:
            self.number = number

        def __len__(self) -> int:
            return self.number

        def call_some(self, ranks: Sequence[int], work: Any, *_: Any, **__: Any) -> list[Any]:
            told.append((work.__name__, tuple(ranks)))
            return []

    def probe(group: NodeGroup, _: Bench, __: float) -> NodeGroup:
        told.append(("probe", ()))
        return group

    group = find_cluster("h200-1x").group
    for number, threads, others in ((2, 2, (1,)), (8, 1, (1, 2, 3)), (8, 4, ())):
        told.clear()
        given = bench(cores=4, threads=threads, peers=Recorded(number))
        probes = [Probe("a", 1, probe, together=True), Probe("b", 1, probe)]
        list(machine._measured(probes, group, given, 1.0))
        around = [("begin", others), ("probe", ()), ("end", others)] if others else [("probe", ())]
        assert told == [*around, ("probe", ())]
    assert {p.name for p in COMPUTE if not p.together} == {HEAT.name}


@pytest.mark.parametrize(("devices", "part"), [(1, 1.0), (4, 1.0), (5, 0.8), (16, 0.25)])
def test_devices_that_outnumber_the_cores_take_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: int, part: float
) -> None:
    """Four cores are measured one at a time; more devices together have no more than these."""
    rates = {"peak_flops": {"fp32": 1e11, "bf16": 5e10}, "memory_bandwidth": 8e10}
    alone = rates | {"launch_overhead": 1e-5}

    def probe(group: NodeGroup, given: Bench, _: float) -> NodeGroup:
        assert given.threads == max(1, 4 // devices)
        sources = dict.fromkeys(alone, "measured by bigplan profile: alone")
        return group.model_copy(update={"gpu": group.gpu.replaced(alone, sources)})

    monkeypatch.setattr(machine, "available_cores", lambda: 4)
    for name in ("COMPUTE", "PROBES"):
        monkeypatch.setattr(machine, name, (Probe("all", 1, probe),))
    nothing = Probe("collectives", 1, lambda group, given, seconds: group)
    monkeypatch.setattr(machine, "COLLECTIVES", nothing)
    monkeypatch.setattr(machine, "start_peers", lambda *_: nullcontext())
    before = detect(cpu_devices=devices, folder=tmp_path, drive=False)
    detected = machine.measure_cpu_devices(before).group.gpu
    profiled_, _ = profiled(Wish(cpu_devices=devices))
    for gpu in (detected, profiled_.after.group.gpu):
        assert gpu.peak("fp32") == pytest.approx(1e11 * part)
        assert gpu.peak("bf16") == pytest.approx(5e10 * part)
        assert gpu.memory_bandwidth == pytest.approx(8e10 * part)
        assert gpu.launch_overhead == pytest.approx(1e-5 / part)
        assert ("take turns on 4 core(s)" in gpu.sources["peak_flops"]) == (part < 1)


def test_gpus_that_torch_does_not_see_are_no_reason_to_measure_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(machine, "find_gpus", lambda: (FoundGpu("NVIDIA H200", 2**37, 5, 16),))
    with pytest.raises(InputError, match=r"1 x NVIDIA H200, but this torch .* --cpu-devices 1"):
        machine._devices(Wish())
    assert [device.type for device in machine._devices(Wish(cpu_devices=1))] == ["cpu"]


def test_a_busy_machine_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1.6, 0.0, 0.0))
    (told,) = machine._warnings(bench(), [Use()])
    assert tells(told, "1.6 cores", "there are 2")
    monkeypatch.setattr("os.getloadavg", lambda: (0.3, 9.0, 9.0))
    assert list(machine._warnings(bench(), [Use()])) == []


def test_gpus_that_differ_are_not_measured_as_one() -> None:
    one, other = (FoundGpu(name, 24 << 30, 4, 16) for name in ("A", "B"))
    machine.require_alike((one, one))
    with pytest.raises(InputError, match=r"has A and B.*CUDA_VISIBLE_DEVICES.*`bigplan detect`"):
        machine.require_alike((one, other, one))
