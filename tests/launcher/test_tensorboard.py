import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigplan.launcher.record import Metric
from bigplan.launcher.tensorboard import EventFile, scalars

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")

METRIC = Metric(step=1, loss=2.5, seconds=0.5, tokens_per_second=64.0, memory={"gpu": 10})


def events(run: Path) -> Iterator[object]:
    """Records are: length (8 bytes), its checksum (4), an event, its checksum (4)."""
    for path in sorted((run / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[12 + length + 4 :]


def test_only_what_a_step_has_is_shown() -> None:
    assert scalars(METRIC) == {
        "loss": 2.5,
        "seconds": 0.5,
        "tokens_per_second": 64.0,
        "memory/gpu": 10.0,
    }


def test_a_step_reads_back(tmp_path: Path) -> None:
    file = EventFile(tmp_path, 0)
    file.add(METRIC)
    version, step = events(tmp_path)  # written at once, not when the file is closed
    assert version.file_version == "brain.Event:2"  # type: ignore[attr-defined]
    assert step.step == 1  # type: ignore[attr-defined]
    values = {v.tag: v.simple_value for v in step.summary.value}  # type: ignore[attr-defined]
    assert values == scalars(METRIC)
    file.close()


def test_a_resumed_run_hides_the_steps_that_are_run_again(tmp_path: Path) -> None:
    EventFile(tmp_path, 0).close()
    (first,) = (tmp_path / "tensorboard").iterdir()
    first.rename(first.with_name("events.out.tfevents.1"))
    EventFile(tmp_path, 7).close()
    *_, last = events(tmp_path)
    assert last.session_log.status == event_pb2.SessionLog.START  # type: ignore[attr-defined]
    assert last.step == 8  # type: ignore[attr-defined]


def test_a_full_disk_ends_the_file_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, event: object) -> None:
        raise OSError(28, "No space left on device")

    file = EventFile(tmp_path, 0)
    monkeypatch.setattr("tensorboardX.event_file_writer.EventsWriter.write_event", full)
    file.add(METRIC)
    assert "No space left" in file.trouble
    file.add(METRIC)
    file.close()


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bigplan.launcher.tensorboard.find_spec", lambda name: None)
    file = EventFile(tmp_path, 0)
    file.add(METRIC)
    assert "pip install 'bigplan[launch]'" in file.trouble
    assert not (tmp_path / "tensorboard").exists()


def test_torch_is_not_needed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from bigplan.launcher.tensorboard import EventFile;"
        f"EventFile(Path({str(tmp_path)!r}), 0).close(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert list((tmp_path / "tensorboard").iterdir())
