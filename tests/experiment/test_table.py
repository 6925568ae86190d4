"""Results as CSV and Parquet."""

import csv
import importlib.util
from pathlib import Path

import pytest

from bigplan.experiment import table
from bigplan.experiment.folder import MeasuredPoint
from bigplan.experiment.row import StudyRow
from bigplan.experiment.table import measured_table, results_table, write_tables
from tests.experiment.rows import index, row


def test_swept_keys_and_everything_in_a_row(tmp_path: Path) -> None:
    points = index(
        {"nodes": 1, "training.clip_norm": None}, {"nodes": "x", "model": {"b": 1, "a": 2}}
    )
    made = results_table(points, [row(3.0), StudyRow.failed("no,\nit does not")])
    files = write_tables(tmp_path, "results", made)
    assert [path.name for path in files] == ["results.csv", "results.parquet"]
    with files[0].open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["point"], first["sweep.nodes"], first["nodes"]) == ("0", "1", "1")
    assert first["sweep.training.clip_norm"] == ""
    assert float(first["step_seconds"]) == 1000.0 / 3.0, "all digits"
    assert second["sweep.model"] == '{"a": 2, "b": 1}'
    assert (second["status"], second["reason"]) == ("failed", "no, it does not")


def test_parquet_has_the_same(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    made = results_table(index({"nodes": 1}, {"nodes": "x"}), [row(), StudyRow.failed("why")])
    (_, path) = write_tables(tmp_path, "results", made)
    read = parquet.read_table(path).to_pydict()
    assert read["sweep.nodes"] == ["1", "x"], "a column of several types is text"
    assert read["step_seconds"] == [1.0, None]
    assert list(read) == list(made)


def test_without_pyarrow_there_is_no_parquet_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = results_table(index({}), [row()])
    write_tables(tmp_path, "results", made)
    find = importlib.util.find_spec
    monkeypatch.setattr(table, "find_spec", lambda name: None if name == "pyarrow" else find(name))
    assert write_tables(tmp_path, "results", made) == (tmp_path / "results.csv",)
    assert not (tmp_path / "results.parquet").exists()


def test_measured_beside_predicted() -> None:
    found = {1: MeasuredPoint(step_seconds=0.8, steps=3), 2: MeasuredPoint(reason="it broke")}
    made = measured_table(index({"n": 1}, {"n": 2}, {"n": 3}), [row(), row(), row()], found)
    assert made["point"] == [1, 2]
    assert made["sweep.n"] == [2, 3]
    assert made["predicted_step_seconds"] == [1.0, 1.0]
    assert made["error"] == [pytest.approx(0.25), None]
    assert made["reason"] == ["", "it broke"]
