import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.errors import InputError
from bigplan.launcher.metrics_file import MetricsFile
from bigplan.launcher.record import (
    MEASURED,
    METRICS,
    PREDICTED,
    Asked,
    Metric,
    Summary,
    new_folder,
    read_metrics,
    read_record,
    write_start,
    write_summary,
    write_timeline,
)
from bigplan.planner import simulate_plan
from bigplan.spec.experiment import LaunchSpec
from bigplan.timeline import Timeline
from tests.launcher.fakes import full_at
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


METRIC_TEXT = METRIC.model_dump_json(exclude_none=True) + "\n"
EVENTS = '{"events": [[0, "gpu compute", "forward", 1, 0, %s]], "seconds": 3.0}'


def written(parent: Path) -> tuple[Path, Timeline]:
    folder = new_folder(parent, "my model")
    timeline = simulate_plan(tiny_plan())
    write_start(folder, tiny_plan(), LaunchSpec(steps=1), Asked(nodes=1), timeline)
    MetricsFile(folder).add(METRIC)
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
        (METRICS, '{"step": 1, "los\n', r"metrics.jsonl:1: not JSON"),
        (METRICS, '{"step": 1, "los": 2}\n', r"metrics.jsonl:1.*los"),
        (METRICS, METRIC_TEXT.replace("1.0", "-1.0"), r"metrics.jsonl:1.*seconds"),
        (METRICS, METRIC_TEXT.replace('"step":1', '"step":-1'), r"metrics.jsonl:1.*step"),
        (PREDICTED, '{"events": 3}', "is no timeline"),
        (PREDICTED, EVENTS % "2.0, 1.0", r"no timeline: forward of layer 1 .* from 2.0 s to 1.0 s"),
        (MEASURED, EVENTS % "-2.0, 1.0", r"from -2.0 s to 1.0 s; time runs forward"),
        ("summary.json", "{}", "summary.json.*status"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder, _ = written(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(InputError, match=f"(?s){message}.*, or remove (that line|the file): "):
        read_record(folder)


def test_other_folders_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no run"):
        read_record(tmp_path)


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot create a run folder.*with --run-dir"):
        new_folder(tmp_path / "file", "m")


def test_a_run_folder_that_ray_would_remove(tmp_path: Path) -> None:
    job = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    with pytest.raises(InputError, match=r"which Ray made for this job.*in full with --run-dir"):
        new_folder(job / "runs", "m")
    assert not job.exists()


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(0, 40)), max_size=5),
)
def test_whatever_is_killed_and_resumed_every_step_is_on_record_once(
    first: int, resumptions: list[tuple[int, int, int]]
) -> None:
    """Runs append steps; a kill may cut the last line; each resumption goes back to a checkpoint
    that is no newer than the last whole line."""
    with tempfile.TemporaryDirectory() as name:
        folder, life = Path(name), 0

        def append(steps: range) -> None:
            for step in steps:
                MetricsFile(folder).add(METRIC.model_copy(update={"step": step, "seconds": life}))

        append(range(1, first + 1))
        for back, more, cut in resumptions:
            text = (folder / METRICS).read_text()
            (folder / METRICS).write_text(text[: len(text) - min(cut, 40)])  # within a line
            life += 1
            whole = len(read_metrics(folder))
            done = max(0, whole - back)
            kept = MetricsFile(folder).rewind(done)
            assert [metric.step for metric in kept] == list(range(1, done + 1))
            append(range(done + 1, done + more + 1))
            steps = read_metrics(folder)
            assert [metric.step for metric in steps] == list(range(1, done + more + 1))
            assert {metric.seconds for metric in steps[done:]} == {life}


def test_steps_wait_for_room_and_none_is_cut_or_lost(tmp_path: Path) -> None:
    """The limit of a file's size is an honest full disk: it takes a part of what is written."""
    file = MetricsFile(tmp_path)
    lines = [METRIC.model_copy(update={"step": step}) for step in range(1, 6)]
    file.add(lines[0])
    with full_at(len(METRIC_TEXT) + 10):
        file.add(lines[1])
        assert "File too large" in file.trouble
        assert (tmp_path / METRICS).read_text() == METRIC_TEXT
        with pytest.raises(OSError, match="File too large"):
            file.settle()
        file.add(lines[2])
    file.add(lines[3])
    assert not file.trouble
    assert read_metrics(tmp_path) == tuple(lines[:4])
    with full_at(10):
        file.add(lines[4])
    assert file.rewind(5) == read_metrics(tmp_path) == tuple(lines)


def test_a_run_that_was_killed_reads_back(tmp_path: Path) -> None:
    folder, _ = written(tmp_path)
    with (folder / METRICS).open("a") as file:
        file.write('{"step": 2, "lo')
    write_summary(folder, SUMMARY.model_copy(update={"status": "running"}))
    record = read_record(folder)
    assert (record.metrics, record.summary.status) == ((METRIC,), "running")


def test_a_record_of_before_there_were_checkpoints(tmp_path: Path) -> None:
    folder, _ = written(tmp_path)
    (folder / METRICS).write_text('{"step":1,"loss":2.5,"seconds":1.0,"tokens_per_second":128.0}\n')
    old = SUMMARY.model_dump(exclude={"target_steps", "checkpoint", "resumed"})
    (folder / "summary.json").write_text(json.dumps(old))
    record = read_record(folder)
    assert (record.metrics, record.summary) == ((METRIC,), SUMMARY)


def test_a_loss_that_is_no_number_reads_back(tmp_path: Path) -> None:
    MetricsFile(tmp_path).add(METRIC.model_copy(update={"loss": None}))
    assert read_metrics(tmp_path)[0].loss is None
