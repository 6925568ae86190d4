"""`bigplan profile`, from outside; probes of toy size."""

import importlib.util
import json
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bigplan.profile import machine
from bigplan.spec.catalog import find_cluster
from bigplan.spec.cluster import Cluster
from bigplan.spec.files.dump import to_yaml
from tests.cli.conftest import Run
from tests.profile.small import shrink
from tests.tiny import small_cluster


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    soon = partial(machine.measure_cpu_devices, seconds=0.5)
    monkeypatch.setattr(machine, "measure_cpu_devices", soon)


@pytest.fixture
def refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be measured."""

    def measured(*_: object) -> None:
        raise AssertionError("measured although the input is bad")

    monkeypatch.setattr(machine, "profile_machine", measured)


@pytest.mark.usefixtures("quick")
def test_a_profile_that_plan_takes(bigplan: Run, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    code, out, err = bigplan("profile", "--quick", "--cpu-devices", 1, "--nvme", drive, "--json")
    assert code == 0
    assert "matrix products" in err
    assert "launch_overhead" in err
    told = json.loads(out)
    assert told["written"] == "cluster.yaml"
    assert {figure["name"] for figure in told["measured"][0]} >= {"launch_overhead"}
    cluster = find_cluster(str(tmp_path / "cluster.yaml"))
    assert Cluster.model_validate(told["cluster"]).gpus == 1
    assert cluster.group.nvme is not None
    assert cluster.group.nvme.path == str(drive)
    code, out, _ = bigplan(
        "plan", "--model", "tiny-llama-demo", "--cluster", "cluster.yaml", "--precision", "fp32",
        "--seq-len", 256, "--global-batch", 8, "--no-what-if",
    )  # fmt: skip
    assert code == 0


def test_the_drive_of_the_cluster_that_is_replaced(
    bigplan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    group = find_cluster("h200-1x").group
    assert group.nvme is not None
    known = group.model_copy(update={"nvme": group.nvme.model_copy(update={"path": str(tmp_path)})})
    before = find_cluster("h200-1x").model_copy(update={"node_groups": (known,)})
    (tmp_path / "mine.yaml").write_text(to_yaml(before))
    monkeypatch.setattr(machine, "PROBES", ())
    code, _, _ = bigplan("profile", "--quick", "--cpu-devices", 1, "--out", "mine.yaml")
    assert code == 0
    after = find_cluster(str(tmp_path / "mine.yaml"))
    assert after.group.nvme is not None
    assert after.group.nvme.path == str(tmp_path)
    assert "by bigplan profile" in after.group.nvme.sources["read"]


@pytest.mark.usefixtures("refuses")
def test_a_file_that_is_no_cluster_is_never_replaced(bigplan: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("format: 2\n")
    code, _, err = bigplan("profile", "--quick", "--out", "plan.yaml")
    assert code == 2
    assert "plan.yaml exists and is no cluster that could be replaced" in err
    assert "remove this one first" in err
    assert (tmp_path / "plan.yaml").read_text() == "format: 2\n"


@pytest.mark.usefixtures("refuses")
def test_folders_that_do_not_exist(bigplan: Run) -> None:
    code, _, err = bigplan("profile", "--out", "no/such/cluster.yaml")
    assert code == 2
    assert "the folder no/such does not exist" in err
    code, _, err = bigplan("profile", "--out", ".")
    assert code == 2
    assert "--out . is a folder" in err
    code, _, err = bigplan("profile", "--nvme", "no/such")
    assert code == 2
    assert "--nvme no/such is no folder" in err


@pytest.mark.usefixtures("refuses")
def test_without_torch_the_extra_is_named(bigplan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "bigplan.cli.profile.find_spec", lambda name: None if name == "torch" else real(name)
    )
    code, _, err = bigplan("profile")
    assert code == 2
    assert "pip install 'bigplan[launch]'" in err


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("torch", [True, False])
def test_detect_measures_compute_with_torch_where_it_can(
    bigplan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: bool
) -> None:
    monkeypatch.setattr("bigplan.cli.describe.find_spec", lambda name: torch or None)
    code, _, _ = bigplan("detect", "--cpu-devices", 2, "--out", "mine.yaml")
    assert code == 0
    group = find_cluster(str(tmp_path / "mine.yaml")).group
    for name in ("peak_flops", "attention_forward_efficiency", "launch_overhead"):
        assert ("by bigplan profile" in group.gpu.sources[name]) is torch
    assert ("by bigplan profile: gloo" in group.intra_node.sources["bandwidth"]) is torch
    for part in (group.host, group.pcie):
        assert "by bigplan profile" not in " ".join(part.sources.values())


@pytest.mark.parametrize("load", [0.2, 40.0])
def test_detect_warns_of_a_busy_machine(
    bigplan: Run, monkeypatch: pytest.MonkeyPatch, load: float
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("bigplan.spec.detect.machine.available_cores", lambda: 8)
    monkeypatch.setattr("bigplan.spec.detect.cluster.detect", lambda *_: small_cluster())
    monkeypatch.setattr("bigplan.cli.describe.find_spec", lambda _: None)
    code, out, err = bigplan("detect")
    assert code == 0
    assert "node_groups" in out
    assert ("40.0 cores" in err and "there are 8" in err) is (load > 1)


def test_what_detect_refuses_comes_before_what_it_warns_of(
    bigplan: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1e6, 0.0, 0.0))
    for arguments in (("--cpu-devices", 0), ("--cpu-devices", 10**6), ("--folder", "absent")):
        code, _, err = bigplan("detect", *arguments)
        assert (code, "warning" in err) == (2, False), err


@pytest.mark.usefixtures("refuses")
def test_an_interface_is_of_several_nodes(bigplan: Run) -> None:
    code, _, err = bigplan("profile", "--interface", "eth0")
    assert code == 2
    assert "name that with --address" in err


def test_multiprocessors_are_a_gpus(bigplan: Run, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, err = bigplan("profile", "--multiprocessors", str(tmp_path / "sm.yaml"))
    assert code
    assert "on a CUDA GPU" in err
