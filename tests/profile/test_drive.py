import threading
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.errors import InputError
from bigplan.profile import drive
from bigplan.profile.drive import MOVED, _around, _rates, _size, measure_drive
from bigplan.spec.catalog import find_cluster
from bigplan.spec.cluster import NodeGroup
from tests.profile.small import bench, shrink

GiB = 2**30


def on_two_drives() -> NodeGroup:
    group = find_cluster("h200-1x").group
    assert group.nvme is not None
    return group.model_copy(update={"nvme": group.nvme.model_copy(update={"drives": 2})})


@pytest.mark.parametrize(
    ("free", "size"), [(1000 * GiB, 4 * GiB), (8 * GiB, 2 * GiB), (GiB + 5, GiB // 4)]
)
def test_the_file_is_bounded(
    free: int, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(drive, "available_disk", lambda folder: free)
    assert _size(tmp_path) == size


def test_a_full_disk_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drive, "available_disk", lambda folder: 900 * 2**20)
    with pytest.raises(InputError, match=r"has 900 MiB free, .* leave --nvme out"):
        _size(tmp_path)


def test_a_folder_that_cannot_be_written_to() -> None:
    with pytest.raises(InputError, match="cannot write to /proc"):
        drive._file(Path("/proc"), MOVED)


def test_rates_are_per_drive_and_the_file_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shrink(monkeypatch)
    monkeypatch.setattr(drive, "_rates", lambda *_: {"read": 4e9, "write": 2e9, "both_ways": 5e9})
    nvme = measure_drive(on_two_drives(), bench(folder=tmp_path), 0.1).nvme
    assert nvme is not None
    assert (nvme.read, nvme.write, nvme.both_ways) == (2e9, 1e9, 2.5e9)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_removed_after_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shrink(monkeypatch)

    def fail(*_: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(drive, "_rates", fail)
    with pytest.raises(OSError, match="gone"):
        measure_drive(on_two_drives(), bench(folder=tmp_path), 0.1)
    assert list(tmp_path.iterdir()) == []


class SlowAtFirst:
    """A drive that takes 3 s for the first MOVED bytes at a place and 1 s for all later ones."""

    size = 64 * drive.MOVED

    def __init__(self) -> None:
        self.seconds = 0.0
        self.written: set[int] = set()
        self.calls: list[tuple[str, int, str]] = []  # what, where, by which thread

    def write(self, at: int, source: Tensor) -> None:
        self._called("write", at, 1.0 if at in self.written else 3.0)
        self.written.add(at)

    def read(self, at: int, into: Tensor) -> None:
        assert at in self.written
        self._called("read", at, 1.0)

    def _called(self, what: str, at: int, seconds: float) -> None:
        self.calls.append((what, at, threading.current_thread().name))
        self.seconds += seconds


@pytest.mark.parametrize("seconds", [24.0, 800.0, 4000.0])  # a part of the file, all of it, around
def test_what_is_timed_was_written_before(seconds: float) -> None:
    file = SlowAtFirst()
    buffers = (torch.empty(8, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8))
    rates = _rates(file, buffers, bench(clock=lambda: file.seconds), seconds)  # type: ignore[arg-type]
    assert rates["write"] == rates["read"] == MOVED
    main = threading.current_thread().name
    together = [(what, at) for what, at, thread in file.calls if thread != main]
    read = {at for what, at in together if what == "read"}
    written = {at for what, at in together if what == "write"}
    assert read
    assert written
    assert not read & written
    before = {at for what, at, thread in file.calls if thread == main and what == "write"}
    assert written <= before


def test_calls_go_around_the_file() -> None:
    assert list(islice(_around(3 * MOVED), 4)) == [0, MOVED, 2 * MOVED, 0]
