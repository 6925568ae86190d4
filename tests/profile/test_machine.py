from pathlib import Path

import pytest

pytest.importorskip("torch")

from bigplan.errors import InputError
from bigplan.planner import Request, make_plan
from bigplan.profile import machine
from bigplan.profile.machine import DRIVE, PROBES, Wish
from bigplan.profile.memory import Use
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.detect import detect
from bigplan.spec.document import parse_document
from bigplan.spec.dump import to_yaml
from bigplan.spec.machine import FoundGpu
from bigplan.spec.training import Training
from tests.profile.clock import FakeClock
from tests.profile.small import bench, profiled, shrink

BLOCKS = ("gpu", "host", "pcie", "nvme")
# What only names, counts, or stands for itself on a CPU.
UNMEASURED = {
    "gpu": {"memory", "multiprocessors", "context_memory"},
    "host": {"memory"},
    "pcie": set[str](),
    "nvme": {"capacity", "drives"},
}


def test_a_cpu_profile_measures_everything_and_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)
    found, told = profiled(Wish("mine", tmp_path, cpu_devices=2, seconds=0.5))
    assert [step.name for step in told] == [probe.name for probe in (*PROBES, DRIVE)]
    assert list(tmp_path.iterdir()) == []  # the drive's file is gone
    group = found.after.group
    for name in BLOCKS:
        block = getattr(group, name)
        for field, source in block.sources.items():
            measured = "by bigplan profile: " in source
            assert measured != (field in UNMEASURED[name]), (name, field, source)
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


def test_compute_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shrink(monkeypatch)
    before = detect(cpu_devices=2, folder=tmp_path, drive=False)
    group = machine.measure_cpu_compute(before, 0.2).group
    for name in ("peak_flops", "attention_forward_efficiency", "launch_overhead"):
        assert "by bigplan profile" in group.gpu.sources[name]
    assert (group.host, group.pcie) == (before.group.host, before.group.pcie)


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
    assert told.startswith("1.6 of 2 cores were busy")
    monkeypatch.setattr("os.getloadavg", lambda: (0.3, 9.0, 9.0))
    assert list(machine._warnings(bench(), [Use()])) == []
