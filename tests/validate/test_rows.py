"""The loader: every file of the format loads or says which row and column is wrong."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.errors import InputError
from bigplan.validate.rows import COLUMNS_NEEDED, COLUMNS_TOLD, PublishedRow, read_rows
from tests.wording import tells

SHIPPED = "bigplan/validate/measured.csv"
GOOD = {
    "id": "lab-001",
    "trust": "A",
    "source": "a lab",
    "gpu": "A100-80GB",
    "n_gpus": "8",
    "layers": "24",
    "hidden": "2048",
    "seq_len": "1024",
}


def _file(folder: Path, rows: list[dict[str, str]], name: str = "rows.csv") -> Path:
    columns = list(dict.fromkeys([*GOOD, *(column for row in rows for column in row)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path = folder / name
    path.write_text(text.getvalue(), encoding="utf-8", newline="")
    return path


def _one(folder: Path, **columns: str) -> PublishedRow:
    (row,) = read_rows(_file(folder, [GOOD | columns]))
    return row


def _refusal(path: Path) -> str:
    with pytest.raises(InputError) as refused:
        read_rows(path)
    return str(refused.value)


def test_the_shipped_rows_load_and_are_told_apart() -> None:
    rows = read_rows()
    assert len(rows) > 600
    assert len({row.id for row in rows}) == len(rows)
    assert {row.trust for row in rows} == {"A", "B", "C"}


def test_what_a_row_says_is_kept_and_a_blank_is_none(tmp_path: Path) -> None:
    row = _one(tmp_path, step_time_s="1.5", tp=" ", framework=" Megatron-LM ", notes="")
    assert (row.id, row.layers, row.step_time_s) == ("lab-001", 24, 1.5)
    assert (row.tp, row.framework, row.notes) == (None, "Megatron-LM", "")


def test_the_table_is_the_identifier_without_its_number(tmp_path: Path) -> None:
    assert _one(tmp_path).group == "lab"
    assert _one(tmp_path, id="two-parts-7").group == "two-parts"
    assert _one(tmp_path, id="single").group == "single"


def test_blank_lines_and_columns_in_any_order_load(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    header, values = list(GOOD)[::-1], list(GOOD.values())[::-1]
    path.write_text(f"{','.join(header)}\n\n{','.join(values)}\n\n")
    (row,) = read_rows(path)
    assert (row.id, row.hidden) == ("lab-001", 2048)


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    path = _file(tmp_path, [GOOD])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [row.id for row in read_rows(path)] == ["lab-001"]


def test_unknown_columns_are_named_with_what_they_resemble(tmp_path: Path) -> None:
    told = _refusal(_file(tmp_path, [GOOD | {"step_times_s": "2", "Micro_Batch ": "1", "wx": ""}]))
    first, second = told.splitlines()
    assert first.endswith("rows.csv: unknown column 'step_times_s'; did you mean 'step_time_s'?")
    assert tells(second, "'Micro_Batch '", "'micro_batch'")
    path = tmp_path / "rows.csv"
    path.write_text(",".join([*GOOD, "layers", ""]) + "\n")
    told = _refusal(path)
    assert "the column 'layers' is there twice" in told
    assert "column 10 has no name; write columns of the shipped " + SHIPPED in told


def test_columns_of_somebody_elses_are_left_alone(tmp_path: Path) -> None:
    assert _one(tmp_path, weather="rain").id == "lab-001"


def test_columns_that_tell_readers_more_are_read_over(tmp_path: Path) -> None:
    assert _one(tmp_path, **dict.fromkeys(COLUMNS_TOLD, "words")).id == "lab-001"


def test_a_row_of_ones_own_needs_no_name(tmp_path: Path) -> None:
    own = {column: GOOD[column] for column in COLUMNS_NEEDED}
    path = tmp_path / "our-lab.csv"
    lines = (",".join(own), ",".join(own.values()), ",".join(own.values()))
    path.write_text("\n".join(lines) + "\n")
    first, second = read_rows(path)
    assert (first.id, first.trust, first.source) == ("our-lab-2", "A", "our-lab.csv")
    assert (second.id, second.group) == ("our-lab-3", "our-lab")
    blank = _one(tmp_path, id="", trust=" ", source="")
    assert (blank.id, blank.trust, blank.source) == ("rows-2", "A", "rows.csv")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_fields_may_hold_commas_quotes_and_newlines(tmp_path: Path, newline: str) -> None:
    path = _file(tmp_path, [GOOD | {"notes": 'a, "b"\nc\u2028d'}, GOOD | {"id": "lab-002"}])
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8", newline=newline)
    first, second = read_rows(path)
    assert first.notes == 'a, "b"\nc\u2028d'
    assert second.id == "lab-002"


def test_no_rows_are_no_error(tmp_path: Path) -> None:
    assert read_rows(_file(tmp_path, [])) == []


@pytest.mark.parametrize("column", COLUMNS_NEEDED)
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",".join(c for c in GOOD if c != column) + "\n")
    told = _refusal(path)
    assert re.search(rf"lacks {column}; ", told)
    assert "rows.csv" in told


def test_an_empty_file_lacks_every_column(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("")
    assert ", ".join(COLUMNS_NEEDED) in _refusal(tmp_path / "rows.csv")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("layers", "many"),
        ("layers", "-3"),
        ("layers", "2.5"),
        ("n_gpus", "1e99"),
        ("step_time_s", "fast"),
        ("step_time_s", "nan"),
        ("step_time_s", "inf"),
        ("step_time_s", "-1"),
        ("zero_stage", "4"),
        ("gated_mlp", "2"),
        ("gpu", ""),
    ],
)
def test_a_wrong_value_is_named_with_its_row_and_column(
    tmp_path: Path, column: str, value: str
) -> None:
    told = _refusal(_file(tmp_path, [GOOD, GOOD | {"id": "lab-002", column: value}]))
    assert f"row 3, column {column}: " in told
    assert repr(value or None) in told
    assert told.endswith("correct it or leave it blank")


def test_rows_are_counted_as_an_editor_counts_lines(tmp_path: Path) -> None:
    path = _file(tmp_path, [GOOD, GOOD | {"layers": "x"}])
    path.write_text(path.read_text().replace("\n", "\n\n"))
    assert "row 5, column layers" in _refusal(path)


def test_fields_without_a_column_are_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, [GOOD])
    path.write_text(path.read_text().rstrip() + ",surplus\n")
    assert "row 2 has more fields than the header has columns" in _refusal(path)


def test_a_short_row_is_blank_where_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",".join(GOOD) + "\nlab-001,A\n")
    assert "row 2, column gpu: None is not valid" in _refusal(path)
    path.write_text(",".join(GOOD) + "\nlab-001,A,,A100-80GB\n")
    (row,) = read_rows(path)
    assert (row.gpu, row.layers) == ("A100-80GB", None)


def test_a_field_longer_than_csv_allows_is_refused(tmp_path: Path) -> None:
    told = _refusal(_file(tmp_path, [GOOD | {"notes": "x" * (csv.field_size_limit() + 1)}]))
    assert ": not CSV (field larger than field limit" in told


def test_files_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    assert "cannot read" in _refusal(tmp_path / "absent.csv")
    assert "cannot read" in _refusal(tmp_path)
    (tmp_path / "binary.csv").write_bytes(b"id,\xff\xfe")
    assert "cannot read" in _refusal(tmp_path / "binary.csv")


NUMBERS = st.one_of(
    st.integers(-10, 10**10).map(str), st.floats().map(str), st.sampled_from(("0", "1", "8"))
)
CELLS = st.one_of(st.just(""), NUMBERS, st.text(st.characters(codec="utf-8"), max_size=12))


@given(st.data())
def test_any_file_of_the_format_loads_or_names_row_and_column(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    names = st.sampled_from((*PublishedRow.model_fields, *COLUMNS_TOLD, "weather"))
    columns = list(dict.fromkeys([*GOOD, *data.draw(st.lists(names, max_size=6))]))
    columns = data.draw(st.permutations(columns))
    cells = {c: st.one_of(st.just(GOOD[c]), CELLS) if c in GOOD else CELLS for c in columns}
    rows = data.draw(st.lists(st.fixed_dictionaries(cells), max_size=4))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    path = tmp_path_factory.mktemp("any") / "rows.csv"
    path.write_text(text.getvalue(), encoding="utf-8", newline="")
    told = ""
    try:
        found = read_rows(path)
    except InputError as error:
        told = str(error)
    if told:
        named = re.search(r"rows\.csv, row (\d+), column (\w+): ", told)
        assert named is not None, told
        assert named[2] in PublishedRow.model_fields
    else:
        assert len(found) == len(rows)
