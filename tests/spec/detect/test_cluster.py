import errno
from pathlib import Path

import pytest

from bigplan.errors import InputError
from bigplan.spec.cluster import Cluster
from bigplan.spec.detect import cluster as module
from bigplan.spec.detect import probes
from bigplan.spec.detect.cluster import detect
from bigplan.spec.detect.machine import FoundGpu
from bigplan.spec.detect.probes import DiskRate, GemmRate, probe_disk
from bigplan.spec.files.document import parse_document
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.gpu import find_gpu

GiB = 2**30


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "visible_gpus", tuple)


def with_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: FoundGpu) -> None:
    """A machine with these GPUs, whose probes answer at once."""
    monkeypatch.setattr(module, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(module, "probe_copy", lambda threads: 1e11)
    monkeypatch.setattr(module, "probe_disk", lambda folder: None)


@pytest.mark.usefixtures("without_gpus")
def test_a_cpu_machine(tmp_path: Path) -> None:
    cluster = detect(cpu_devices=2, folder=tmp_path)
    group = cluster.group
    assert (group.gpus_per_node, group.gpu.device, cluster.gpus) == (2, "cpu", 2)
    assert 2 * group.gpu.memory <= group.host.memory
    assert 2 * group.gpu.memory == pytest.approx(group.host.memory / 2, rel=0.01)
    assert group.gpu.peak("fp32") > 1e8
    assert group.gpu.multiprocessors == max(1, group.host.cores // 2)
    assert group.nvme is not None
    assert group.nvme.path == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert parse_document(to_yaml(cluster), Cluster) == cluster


@pytest.mark.parametrize("devices", [1, 4, 64])
def test_devices_share_what_the_machine_has(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    with_gpus(monkeypatch)
    monkeypatch.setattr(module, "available_cores", lambda: 4)
    monkeypatch.setattr(module, "probe_gemm", lambda: GemmRate(peak=8e10, half_k=64.0))
    group = detect(cpu_devices=devices).group
    gpu = group.gpu
    for each, whole in (
        (gpu.peak("fp32"), 8e10),
        (gpu.memory_bandwidth, group.host.memory_bandwidth),
        (gpu.adam_rate, group.host.adam_rate),
    ):
        assert devices * each == pytest.approx(whole, rel=0.01)
    turns = max(1, devices // 4)  # on a core, which each device needs to launch an operator
    assert gpu.launch_overhead == pytest.approx(15e-6 * turns)
    assert group.pcie.latency == gpu.launch_overhead
    assert ("take turns" in gpu.sources["launch_overhead"]) == (turns > 1)


def test_a_known_gpu_has_the_shipped_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, *[FoundGpu("NVIDIA H200", 140 * GiB, 5, 16)] * 4)
    cluster = detect()
    group = cluster.group
    assert (cluster.gpus, group.gpu.memory, group.nvme) == (4, 140 * GiB, None)
    assert group.gpu.gemm_efficiency == find_gpu("h200-sxm").gemm_efficiency
    assert group.gpu.sources["memory_bandwidth"].startswith("as h200-sxm: NVIDIA H200 datasheet")
    assert group.gpu.multiprocessors == 132
    assert group.pcie.node_host_to_device == 200e9
    assert group.pcie.sources["node_host_to_device"].startswith("as hgx-h200: measured")
    assert parse_document(to_yaml(cluster), Cluster) == cluster


@pytest.mark.parametrize(
    ("gpu", "number", "lanes", "like"),
    [
        ("NVIDIA H200", 1, 16, "as h200-1x: "),
        ("NVIDIA H200", 2, 16, "as hgx-h200: "),  # one GPU's node says nothing of two
        ("NVIDIA H200", 16, 16, "as hgx-h200: "),
        ("Tesla V100-SXM2-16GB", 4, 16, "as v100-4x: "),  # the same board with less memory
        ("NVIDIA RTX A6000", 2, 16, "as rtx-a6000x4-workstation: "),
        ("NVIDIA RTX A6000", 2, 8, "estimate: 0.8 of PCIe 4.0 x8"),
    ],
)
def test_copies_are_those_of_the_shipped_cluster_that_is_most_alike(
    monkeypatch: pytest.MonkeyPatch, gpu: str, number: int, lanes: int, like: str
) -> None:
    with_gpus(monkeypatch, *[FoundGpu(gpu, 24 * GiB, 4, lanes)] * number)
    assert detect().group.pcie.sources["host_to_device"].startswith(like)


@pytest.mark.parametrize(
    ("available", "gpus", "planned"), [(200, 1, 188), (50, 1, 47), (50, 4, 47)]
)
def test_host_memory_stays_below_what_ray_stops_workers_at(
    monkeypatch: pytest.MonkeyPatch, available: int, gpus: int, planned: int
) -> None:
    with_gpus(monkeypatch, *[FoundGpu("NVIDIA H200", 140 * GiB, 5, 16)] * gpus)
    monkeypatch.setattr(module, "available_memory", lambda: available * GiB)
    assert detect().group.host.memory == planned * GiB


def test_a_gpu_type_that_no_cluster_describes(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, FoundGpu("NVIDIA RTX A5000", 24 * GiB, 4, 8))
    group = detect().group
    assert group.gpu.peak("bf16") == 111.1e12
    assert group.pcie.sources["host_to_device"] == "estimate: 0.8 of PCIe 4.0 x8"
    assert group.intra_node.sources["bandwidth"].startswith("estimate: PCIe")


def test_an_unknown_gpu_is_guessed_low_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, FoundGpu("NVIDIA Novelty", 24 * GiB, 4, 16))
    group = detect().group
    assert (group.gpu.name, group.gpu.memory) == ("NVIDIA Novelty", 24 * GiB)
    assert group.gpu.sources["peak_flops"].startswith("estimate: unknown GPU")
    assert group.pcie.host_to_device == pytest.approx(25.2e9, rel=0.01)
    assert group.pcie.sources["host_to_device"] == "estimate: 0.8 of PCIe 4.0 x16"
    alone = group.shared_by(1).rate_of_rank(group.pcie.node_host_to_device)
    assert alone == group.pcie.host_to_device


def test_unlike_gpus_count_as_the_worst_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"
    with_gpus(monkeypatch, FoundGpu(new, 23 * GiB, 4, 8), FoundGpu(old, 24 * GiB, 4, 16))
    cluster = detect()
    group = cluster.group
    assert old in cluster.description
    assert new in cluster.description
    assert (group.gpus_per_node, group.gpu.name, group.gpu.memory) == (2, old, 23 * GiB)
    assert group.pcie.sources["host_to_device"].endswith("0.8 of PCIe 4.0 x8")
    alone = group.pcie.host_to_device
    assert alone <= group.pcie.node_host_to_device <= 2 * alone
    assert group.gpu.peak("bf16") == find_gpu("rtx-3090").peak("bf16")


def test_bad_arguments(tmp_path: Path) -> None:
    for number in (0, 1025):
        with pytest.raises(InputError, match=f"cpu_devices is {number}; use 1 to 1,024"):
            detect(cpu_devices=number)
    with pytest.raises(InputError, match="is no folder"):
        detect(folder=tmp_path / "absent")
    with pytest.raises(InputError, match=r"/proc takes no file of 96 MiB, .* name another folder"):
        detect(folder=Path("/proc"))


def test_disk_probe_says_how_it_measured(tmp_path: Path) -> None:
    rates = probe_disk(tmp_path, size=8 * 2**20)
    assert rates is not None
    assert min(rates.read, rates.write, rates.latency) > 0
    assert rates.how.startswith(("O_DIRECT", "buffered"))


def test_disk_probe_without_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = probes._disk_rates

    def refuse(name: str, flag: int, size: int, how: str) -> DiskRate:
        if flag:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flag, size, how)

    monkeypatch.setattr(probes, "_disk_rates", refuse)
    rates = probe_disk(tmp_path, size=8 * 2**20)
    assert rates is not None
    assert rates.how == "buffered, O_DIRECT is refused here"


def test_disk_probe_of_an_unwritable_folder() -> None:
    assert probe_disk(Path("/proc")) is None


def test_cpu_devices_on_request_beside_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, FoundGpu("NVIDIA H200", 140 * GiB, 5, 16))
    cluster = detect(cpu_devices=2)
    assert (cluster.gpus, cluster.group.gpu.device) == (2, "cpu")
