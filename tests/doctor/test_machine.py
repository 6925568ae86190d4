import resource
from pathlib import Path

import pytest

from bigplan.doctor import machine


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("always [madvise] never\n", "good"),
        ("[always] madvise never\n", "good"),
        ("always madvise [never]\n", "note"),
        (None, "note"),
    ],
)
def test_huge_pages(tmp_path: Path, text: str | None, state: str) -> None:
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text)
    finding = machine.huge_pages(setting)
    assert finding.state == state
    if text is not None and state == "note":
        assert finding.remedy.endswith(str(setting))


def test_limits() -> None:
    endless = resource.RLIM_INFINITY
    assert machine.locked_memory(endless).found == "unlimited"
    assert machine.locked_memory(8 << 20).state == "note"
    assert machine.locked_memory(8 << 20).found.startswith("8 MiB: NCCL over InfiniBand")
    assert machine.open_files(endless).state == "good"
    assert machine.open_files(1024).state == "note"


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.shared_memory(tmp_path / "none").state == "bad"
    monkeypatch.setattr(machine, "LITTLE_SHARED", 0)
    assert machine.shared_memory(tmp_path).state == "good"
    monkeypatch.setattr(machine, "LITTLE_SHARED", 1 << 60)
    finding = machine.shared_memory(tmp_path)
    assert finding.state == "note"
    assert "--shm-size" in finding.remedy
