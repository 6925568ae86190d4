from pathlib import Path

import pytest

from bigplan.errors import InputError
from bigplan.launcher.record import (
    MEASURED,
    METRICS,
    PREDICTED,
    Metric,
    Summary,
    append_metric,
    new_folder,
    read_record,
    write_start,
    write_summary,
    write_timeline,
)
from bigplan.planner import simulate_plan
from bigplan.timeline import Timeline
from tests.tiny import tiny_plan

SUMMARY = Summary(
    status="finished",
    steps=1,
    ranks=2,
    seconds=1.5,
    predicted_step_seconds=0.5,
    measured_step_seconds=1.0,
    memory=(),
    versions={"python": "3"},
    notes=("a note",),
    digest="ab",
)
METRIC = Metric(step=1, loss=2.5, seconds=1.0, tokens_per_second=128.0)


def written(parent: Path) -> tuple[Path, Timeline]:
    folder = new_folder(parent, "my model")
    timeline = simulate_plan(tiny_plan())
    write_start(folder, tiny_plan(), timeline)
    append_metric(folder, METRIC)
    write_timeline(folder / MEASURED, timeline)
    write_summary(folder, SUMMARY)
    return folder, timeline


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    folder, timeline = written(tmp_path / "runs")
    record = read_record(folder)
    assert folder.name == "my-model-1"
    assert record.plan == tiny_plan()
    assert record.predicted == record.measured == timeline
    assert (record.metrics, record.summary) == ((METRIC,), SUMMARY)


def test_runs_are_numbered(tmp_path: Path) -> None:
    assert [new_folder(tmp_path, "m").name for _ in range(3)] == ["m-1", "m-2", "m-3"]
    assert new_folder(tmp_path, "../..").name == "run-1"


def test_a_run_cut_off_before_its_first_step_ended(tmp_path: Path) -> None:
    folder, _ = written(tmp_path)
    (folder / MEASURED).unlink()
    (folder / METRICS).unlink()
    record = read_record(folder)
    assert (record.measured, record.metrics) == (None, ())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (METRICS, '{"step": 1, "los', r"metrics.jsonl:1: not JSON"),
        (METRICS, '{"step": 1, "los": 2}', r"metrics.jsonl:1.*los"),
        (PREDICTED, '{"events": 3}', "is no timeline"),
        ("summary.json", "{}", "summary.json.*status"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder, _ = written(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read_record(folder)


def test_other_folders_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no run"):
        read_record(tmp_path)


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot create a run folder"):
        new_folder(tmp_path / "file", "m")
