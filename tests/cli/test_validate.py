"""`bigplan validate`."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path

import pytest

from bigplan.validate import score as score_module
from bigplan.validate.rows import COLUMNS_NEEDED, PublishedRow, read_rows
from bigplan.validate.score import Scored, score
from tests.cli.conftest import Run

ROW_KEYS = {
    "id",
    "status",
    "reason",
    "predicted_step_s",
    "measured_step_s",
    "error_pct",
    "predicted_peak_gb",
    "measured_peak_gb",
    "memory_kind",
    "sweep",
}
GROUP_KEYS = {"n", "mape", "median_ape", "bias", "spearman"}
GOOD = ["lab-1", "A", "a lab", "A100-80GB", "8", "24", "2048", "1024", "1.5", "40"]


COLUMNS = ("id", "trust", "source", *COLUMNS_NEEDED, "step_time_s", "peak_mem_gb")


def _file(folder: Path, *rows: list[str]) -> Path:
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return path


@pytest.fixture(autouse=True)
def _scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped rows take 5 s of a core."""
    monkeypatch.setattr(score_module, "score", lambda rows: _scored(tuple(rows)))


@cache
def _scored(rows: tuple[PublishedRow, ...]) -> list[Scored]:
    return score(rows)


def test_the_shipped_rows_as_json(bigplan: Run) -> None:
    code, out, err = bigplan("validate", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert set(found) == {"format", "rows", "groups", "memory", "picks"}
    assert all(set(row) == ROW_KEYS for row in found["rows"])
    assert {row["status"] for row in found["rows"]} == {"scored", "skipped"}
    for tables in (found["groups"], found["memory"]):
        assert all(set(group) == GROUP_KEYS for group in tables.values())
    assert all(set(one) == {"sweeps", "mean", "largest"} for one in found["picks"].values())
    scored = [row for row in found["rows"] if row["status"] == "scored"]
    rows = {name: group["n"] for name, group in found["groups"].items()}
    for several in ("all of trust A", "all with experts", "experts, trust A", "experts, trust B"):
        del rows[several]
    untrusted = {row.id for row in read_rows() if row.trust == "C"}  # predicted, in no table
    assert untrusted
    assert sum(rows.values()) == len([r for r in scored if r["id"] not in untrusted]) > 450


def test_each_run_of_an_own_file_is_told(bigplan: Run, tmp_path: Path) -> None:
    unknown = ["lab-2", "A", "a lab", "RTX 1", *GOOD[4:]]
    rows = json.loads(bigplan("validate", "--rows", _file(tmp_path, GOOD, unknown), "--json")[1])
    code, out, _ = bigplan("validate", "--rows", tmp_path / "rows.csv")
    assert code == 0
    first, second = [line.split() for line in out.splitlines() if line.startswith(" lab-")][:2]
    error = f"{rows['rows'][0]['error_pct']:+.1f}%"
    peak = f"{rows['rows'][0]['predicted_peak_gb']:.1f}"
    assert first[:3] == ["lab-1", "1.5", "s"]
    assert first[-3:] == [error, "40.0", peak]
    assert second[0] == "lab-2"
    assert "skipped" in second
    assert "skipped 1 (lab-2): no description of a RTX 1" in out


def test_the_shipped_rows_as_a_table(bigplan: Run) -> None:
    code, out, err = bigplan("validate")
    assert (code, err) == (0, "")
    assert "mean error" in out
    assert "all of trust A" in out
    assert "bloomA100, nvidia-smi" in out
    assert "mean regret" in out
    assert "mbridge, with experts" in out
    assert "neither step time nor tokens/s were published" in out


def test_rows_of_ones_own(bigplan: Run, tmp_path: Path) -> None:
    path = _file(tmp_path, GOOD, ["lab-2", *GOOD[1:-2], "", ""])
    code, out, _ = bigplan("validate", "--rows", path, "--json")
    assert code == 0
    first, second = json.loads(out)["rows"]
    assert (first["id"], first["status"], first["reason"]) == ("lab-1", "scored", "")
    assert (first["measured_step_s"], first["measured_peak_gb"]) == (1.5, 40.0)
    assert first["predicted_step_s"] > 0
    assert first["predicted_peak_gb"] > 0
    assert (second["status"], second["error_pct"]) == ("skipped", None)
    assert second["reason"]
    assert set(json.loads(out)["groups"]) == {"all of trust A", "lab"}


def test_rows_of_the_least_trust_are_in_no_table_but_told(bigplan: Run, tmp_path: Path) -> None:
    code, out, _ = bigplan("validate", "--rows", _file(tmp_path, [GOOD[0], "C", *GOOD[2:]]))
    assert code == 0
    assert "in no table 1: of trust C" in out


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_file_without_a_row_to_use(
    bigplan: Run, tmp_path: Path, options: tuple[str, ...]
) -> None:
    code, out, err = bigplan("validate", "--rows", _file(tmp_path), *options)
    assert (code, out) == (2, "")
    assert "rows.csv has a header and no rows" in err
    unknown = [*GOOD[:3], "Abacus", *GOOD[4:]]
    untimed = [*GOOD[:-2], "", ""]
    path = _file(tmp_path, untimed, unknown, unknown)
    code, out, err = bigplan("validate", "--rows", path, *options)
    assert (code, out) == (2, "")
    first, second, third = err.splitlines()
    assert "rows.csv: no row of 3 can be used" in first
    assert "2 x no description of a Abacus is shipped" in second
    assert "1 x neither step time nor tokens/s" in third


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_wrong_value_is_an_error_that_says_where(
    bigplan: Run, tmp_path: Path, options: tuple[str, ...]
) -> None:
    wrong = [*GOOD[:5], "a few", *GOOD[6:]]
    code, out, err = bigplan("validate", "--rows", _file(tmp_path, GOOD, wrong), *options)
    assert (code, out) == (2, "")
    assert "row 3, column layers: 'a few' is not valid" in err


def test_files_that_are_no_rows(bigplan: Run, tmp_path: Path) -> None:
    (tmp_path / "text.csv").write_text("not,rows\n1,2\n")
    for path, told in (("text.csv", "the header lacks gpu"), ("absent.csv", "cannot read")):
        code, out, err = bigplan("validate", "--rows", path)
        assert (code, out) == (2, "")
        assert told in err
