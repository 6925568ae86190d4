"""An experiment planned: the same results however it came about, and nothing done twice."""

import csv
from pathlib import Path

import pytest

from bigplan.errors import InputError
from bigplan.experiment import running
from bigplan.experiment.folder import read_index
from bigplan.experiment.planning import PlannedPoint, Task, plan_task
from bigplan.experiment.running import plan_all, read_outcome
from bigplan.plan import load_plan
from tests.experiment.studies import BASE, study, unseen


def counting(monkeypatch: pytest.MonkeyPatch, stop_after: int = 100) -> list[str]:
    """Keys of the points that are planned; Ctrl-C comes in the one after so many."""
    planned: list[str] = []

    def plan(task: Task) -> PlannedPoint:
        if len(planned) == stop_after:
            raise KeyboardInterrupt
        planned.append(task.key)
        return plan_task(task)

    monkeypatch.setattr(running, "plan_task", plan)
    return planned


def test_rows_plans_and_reasons(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    out = tmp_path / "out"
    outcome = plan_all(study(tmp_path), out, 0, lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert [row.status for row in outcome.rows] == ["planned", "planned", "failed"]
    assert "3 sequences" in outcome.rows[2].reason or "divide" in outcome.rows[2].reason
    with (out / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["sweep.training.global_batch"] for line in lines] == ["2", "4", "3"]
    for row, line in zip(outcome.rows[:2], lines[:2], strict=True):
        plan = load_plan(out / line["plan"])
        assert plan.predicted.step_seconds == row.step_seconds == float(line["step_seconds"])
        assert plan.training.global_batch == row.global_batch
        assert row.days == pytest.approx(1e6 / plan.predicted.tokens_per_second / 86400)
        assert row.kwh is not None
        assert row.dollars is None
    assert lines[2]["step_seconds"] == lines[2]["plan"] == ""
    assert lines[2]["reason"] == outcome.rows[2].reason


def test_the_same_bytes_with_any_number_of_processes(tmp_path: Path) -> None:
    studied = study(tmp_path)
    for jobs in (0, 2):
        plan_all(studied, tmp_path / str(jobs), jobs, unseen)
    for name in ("results.csv", "plans/0001.yaml"):
        one, two = ((tmp_path / jobs / name).read_bytes() for jobs in "02")
        assert one == two


def test_ctrl_c_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studied, out = study(tmp_path), tmp_path / "out"
    first = counting(monkeypatch, stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        plan_all(studied, out, 0, unseen)
    unfinished = read_outcome(out, read_index(out))
    assert [row.status for row in unfinished.rows] == ["planned", "planned", "failed"]
    assert "not planned yet" in unfinished.rows[2].reason
    rest = counting(monkeypatch)
    resumed = plan_all(studied, out, 0, unseen)
    assert (len(first), len(rest)) == (2, 1)
    assert not set(first) & set(rest)
    whole = plan_all(studied, tmp_path / "whole", 0, unseen)
    assert resumed.rows == whole.rows
    assert (out / "results.csv").read_bytes() == (tmp_path / "whole/results.csv").read_bytes()


def test_a_row_cut_off_by_a_crash_is_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studied, out = study(tmp_path), tmp_path / "out"
    before = plan_all(studied, out, 0, unseen)
    key = before.index.points[1].key
    row = out / "points" / f"{key}.json"
    # What a kill between a write and its rename leaves.
    row.rename(row.with_name(f"{row.name}.partial"))
    planned = counting(monkeypatch)
    assert plan_all(studied, out, 0, unseen).rows == before.rows
    assert planned == [key]


def test_a_changed_file_plans_only_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    plan_all(study(tmp_path), out, 0, unseen)
    planned = counting(monkeypatch)
    more = "sweep: {grid: {training.global_batch: [8, 4]}}\n"
    outcome = plan_all(study(tmp_path, more), out, 0, unseen)
    assert [row.global_batch for row in outcome.rows] == [8, 4]
    assert len(planned) == 1
    assert sorted(path.name for path in (out / "plans").iterdir()) == ["0000.yaml", "0001.yaml"]
    plan_all(study(tmp_path, more, devices=4, base=BASE.replace("dp: 2", "dp: 4")), out, 0, unseen)
    assert len(planned) == 3, "another cluster or decision, other plans"


def test_equal_points_are_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = counting(monkeypatch)
    more = "sweep: {grid: {training.global_batch: [4, 4]}}\n"
    outcome = plan_all(study(tmp_path, more), tmp_path / "out", 0, unseen)
    assert len(planned) == 1
    assert outcome.rows[0] == outcome.rows[1]


@pytest.mark.parametrize(
    ("more", "line", "told"),
    [
        ("model: [tiny-llama-tst]", 6, "`sweep.grid.model.0` cannot be used: .*did you mean"),
        ("cluster: [dgx-h10]", 6, "did you mean 'dgx-h100'"),
        ("set.tpp: [1]", 6, "`sweep.grid.set.tpp.0` cannot be used: tpp: no such decision"),
        ("hardware.gpu: [h300]", 6, "no GPU type is called 'h300'"),
    ],
)
def test_names_of_nothing_are_told_before_anything_is_planned(
    tmp_path: Path, more: str, line: int, told: str
) -> None:
    studied = study(tmp_path, f"sweep: {{grid: {{{more}}}}}\n")
    with pytest.raises(InputError, match=told) as error:
        plan_all(studied, tmp_path / "out", 0, unseen)
    assert str(error.value).startswith(f"{studied.path}:{line}: ")
    assert not (tmp_path / "out").exists()


def test_a_process_that_was_killed_is_a_row_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bigplan.experiment.workers import Lost

    studied, out = study(tmp_path), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(
            running, "results", lambda tasks, work, jobs: (Lost(task, -9) for task in tasks)
        )
        outcome = plan_all(studied, out, 2, unseen)
    assert all("memory runs out" in row.reason for row in outcome.rows)
    again = plan_all(studied, out, 0, unseen)
    assert [row.status for row in again.rows] == ["planned", "planned", "failed"]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="name another one with --out"):
        plan_all(study(tmp_path), tmp_path / "out", 0, unseen)
    mine = tmp_path / "own" / "results.csv"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(InputError, match="has files and is no folder of `bigplan experiment"):
        plan_all(study(tmp_path), mine.parent, 0, unseen)
    assert [*mine.parent.iterdir()] == [mine]
    with pytest.raises(InputError, match=r"holds no experiment\.json"):
        read_index(tmp_path)
