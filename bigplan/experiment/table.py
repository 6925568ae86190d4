"""Rows as one CSV and one Parquet file, with the same bytes on any machine."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bigplan.experiment.folder import PLANS, MeasuredPoint, StudyIndex, write_part
from bigplan.experiment.row import StudyRow

Table = Mapping[str, Sequence[Any]]  # column: values


def results_table(index: StudyIndex, rows: Sequence[StudyRow]) -> Table:
    """Number, swept keys as `sweep.KEY`, all fields of a row, and the path of its plan."""
    columns: dict[str, list[Any]] = {"point": list(range(len(rows)))}
    for key in index.keys:
        columns[f"sweep.{key}"] = [_cell(entry.values.get(key)) for entry in index.points]
    for name in StudyRow.model_fields:
        columns[name] = [getattr(row, name) for row in rows]
    numbers = enumerate(row.status == "planned" for row in rows)
    columns["plan"] = [plan_name(number) if planned else None for number, planned in numbers]
    return columns


def plan_name(number: int) -> str:
    """The path of a point's plan, relative to the experiment's folder."""
    return f"{PLANS}/{number:04}.yaml"


def measured_table(
    index: StudyIndex, rows: Sequence[StudyRow], measured: Mapping[int, MeasuredPoint]
) -> Table:
    """Launched points: predicted beside measured, and the error."""
    columns: dict[str, list[Any]] = {"point": sorted(measured)}
    for key in index.keys:
        columns[f"sweep.{key}"] = [_cell(index.points[n].values.get(key)) for n in sorted(measured)]
    predicted = [rows[number].step_seconds for number in sorted(measured)]
    columns["predicted_step_seconds"] = predicted
    reached = [measured[number].step_seconds for number in sorted(measured)]
    columns["error"] = [error_of(*pair) for pair in zip(predicted, reached, strict=True)]
    for name in MeasuredPoint.model_fields:
        columns[name] = [getattr(measured[number], name) for number in sorted(measured)]
    return columns


def error_of(predicted: float | None, measured: float | None) -> float | None:
    """The prediction's error as a part of the measured seconds; positive: too high."""
    return None if predicted is None or measured is None else predicted / measured - 1


def _cell(value: Any) -> Any:
    """A swept value in one cell: mappings and lists as JSON."""
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list | tuple) else value


def write_tables(folder: Path, name: str, table: Table) -> tuple[Path, ...]:
    """Write NAME.csv, and NAME.parquet where pyarrow is installed; return the files."""
    written = [folder / f"{name}.csv"]
    write_part(written[0], csv_text(table))
    parquet = folder / f"{name}.parquet"
    if find_spec("pyarrow") is None:
        parquet.unlink(missing_ok=True)  # an older file would be taken for this table
        return tuple(written)
    write_part(parquet, _parquet(table))
    return (*written, parquet)


def csv_text(table: Table) -> str:
    """CSV text; floats have all their digits, unknown cells are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table)
    writer.writerows(zip(*table.values(), strict=True))
    return out.getvalue()


def _parquet(table: Table) -> bytes:
    import pyarrow
    from pyarrow import parquet

    out = io.BytesIO()
    columns = {name: _one_type(values) for name, values in table.items()}
    parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def _one_type(values: Sequence[Any]) -> Sequence[Any]:
    """Values of one type for a column: mixed ones become text."""
    types = {type(value) for value in values if value is not None}
    if len(types) <= 1 or types == {int, float}:
        return values
    return [None if value is None else str(value) for value in values]
