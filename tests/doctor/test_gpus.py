from typing import Any

import pytest

from bigplan.doctor import gpus
from bigplan.errors import InputError
from bigplan.spec.detect.machine import FoundGpu

H100 = FoundGpu("NVIDIA H100 80GB HBM3", 85_520_809_984, 5, 16)
OTHER = FoundGpu("NVIDIA Imaginary 9000", 2**34, 4, 16)


def test_none_is_fine_for_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_gpus", lambda: ())
    monkeypatch.setattr(gpus, "_probed", lambda: {"cuda": None, "devices": []})
    driver, torch = gpus.examine()
    assert driver.state == "note"
    assert torch.found == "computes on the CPU"


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> None:
        raise InputError("nvidia-smi has not answered for 60 s; try it again")

    monkeypatch.setattr(gpus, "find_gpus", silent)
    (driver,) = gpus.examine()
    assert (driver.state, driver.remedy) == ("bad", "try it again")
    assert driver.found == "nvidia-smi has not answered for 60 s"


def test_listed_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_gpus", lambda: (H100, H100, OTHER))
    monkeypatch.setattr(gpus, "_probed", lambda: {"cuda": "13.0", "devices": ["", "", ""]})
    driver, known, unknown, torch = gpus.examine()
    assert driver.found.startswith("2 x NVIDIA H100 80GB HBM3 with 79.65 GiB, 1 x NVIDIA Imag")
    assert known.found == "NVIDIA H100 80GB HBM3 is shipped as h100-sxm-80gb"
    assert (unknown.state, unknown.name) == ("note", "description")
    assert "bigplan profile" in unknown.remedy
    assert (torch.state, torch.found) == ("good", "computes on 3 of 3 (CUDA 13.0)")


@pytest.mark.parametrize(
    ("found", "state", "told"),
    [
        ("ImportError: libcudart", "bad", "torch cannot be asked: ImportError: libcudart"),
        ({"cuda": None, "devices": []}, "bad", "this torch is built for CPUs alone"),
        ({"cuda": "13.0", "devices": []}, "bad", "sees none of the GPUs"),
        ({"cuda": "13.0", "devices": [""]}, "note", "computes on 1 of 2"),
        ({"cuda": "13.0", "devices": ["", "no kernel image"]}, "bad", "GPU 1: no kernel image"),
    ],
)
def test_what_torch_makes_of_two(found: dict[str, Any] | str, state: str, told: str) -> None:
    finding = gpus.torch_finding(2, found)
    assert finding.state == state
    assert told in finding.found
    assert finding.remedy


def test_the_probe_runs_and_says_why_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_PROBE", "import sys; print('{\"devices\": []}')")
    assert gpus._probed() == {"devices": []}
    monkeypatch.setattr(gpus, "_PROBE", "raise SystemExit('no driver')")
    assert gpus._probed() == "no driver"
    monkeypatch.setattr(gpus, "_PROBE", "import os; os._exit(9)")
    assert gpus._probed() == "it ended with 9"
    monkeypatch.setattr(gpus, "_SECONDS", 0.2)
    monkeypatch.setattr(gpus, "_PROBE", "import time; time.sleep(60)")
    assert "had not started" in str(gpus._probed())
