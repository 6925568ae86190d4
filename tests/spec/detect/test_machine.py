import os
from pathlib import Path

import pytest

from bigplan.errors import InputError
from bigplan.spec.detect import machine
from bigplan.spec.detect.machine import (
    FoundGpu,
    available_cores,
    available_memory,
    cpu_name,
    find_gpus,
    parse_gpus,
)

MiB = 2**20


def fake(tmp_path: Path, cgroup: dict[str, str]) -> tuple[Path, Path]:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroups / "a" / "b").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    (proc / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable:  1048576 kB\n")
    (proc / "cpuinfo").write_text("processor : 0\nmodel name : Some CPU @ 2 GHz\n")
    for name, text in cgroup.items():
        (cgroups / name).write_text(text)
    return proc, cgroups


def test_memory_is_the_kernels_estimate(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, {"a/memory.max": "max\n", "a/memory.current": "5\n"})
    assert available_memory(proc, cgroups) == 1024 * MiB


def test_memory_stays_within_every_parent_cgroup(tmp_path: Path) -> None:
    limits = {
        "a/memory.max": f"{512 * MiB}\n",
        "a/memory.current": f"{200 * MiB}\n",
        "a/memory.stat": f"anon 3\ninactive_file {100 * MiB}\n",
    }
    proc, cgroups = fake(tmp_path, limits)
    assert available_memory(proc, cgroups) == (512 - 200 + 100) * MiB


def test_cores_stay_within_the_quota(tmp_path: Path) -> None:
    proc, cgroups = fake(tmp_path, {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "max 100000\n"})
    assert available_cores(proc, cgroups) == 1


def test_this_machine() -> None:
    assert available_memory() > 0
    assert available_cores() >= 1
    assert cpu_name()


def test_cpu_name(tmp_path: Path) -> None:
    assert cpu_name(fake(tmp_path, {})[0]) == "Some CPU @ 2 GHz"
    assert cpu_name(tmp_path / "nowhere") == "CPU"


LISTING = """\
0, GPU-ab12, NVIDIA H200, 143771, 5, 16
1, GPU-cd34, MIG parent, [N/A], 5, 16
2, GPU-ef56, Old, 1024, [N/A], [N/A]
"""
H200, OLD = FoundGpu("NVIDIA H200", 143771 * MiB, 5, 16), FoundGpu("Old", 1024 * MiB, 0, 0)


def test_nvidia_smi_listing() -> None:
    assert parse_gpus(LISTING) == (H200, OLD)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("0", (H200,)),
        ("2, 0", (OLD, H200)),
        ("GPU-ef", (OLD,)),
        ("2,7,0", (OLD,)),  # nothing counts after a number that no GPU has
        ("", ()),
        ("-1", ()),
        ("MIG-ab12", (H200, OLD)),
    ],
)
def test_only_visible_gpus_count(visible: str, gpus: tuple[FoundGpu, ...]) -> None:
    assert parse_gpus(LISTING, visible) == gpus


@pytest.mark.parametrize("does", ["exit 9", "exec sleep 60"])
def test_gpus_that_cannot_be_told_are_not_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """A driver that fails has none; one that does not answer may have some."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if "sleep" not in does:
        assert find_gpus() == ()
        return
    monkeypatch.setattr(machine, "SMI_SECONDS", 0.2)
    with pytest.raises(InputError, match=r"has not answered for 0 s, .* --cpu-devices"):
        find_gpus()
