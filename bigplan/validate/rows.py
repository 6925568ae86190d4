"""Rows of measured training runs; a blank id, source or trust gets a default."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from bigplan.errors import InputError, quoted
from bigplan.spec.files import shipped
from bigplan.spec.files.reading import read_text
from bigplan.spec.files.words import did_you_mean
from bigplan.validate import cells


def _rewritten(rewrite: Callable[[str], str | None]) -> BeforeValidator:
    """Rewrites a cell's text in the words that the rules know."""
    return BeforeValidator(lambda value: rewrite(value) if isinstance(value, str) else value)


# Zero says as little as a blank. The limit keeps a typing error from running for hours.
Count = Annotated[int, Field(ge=0, le=10**8), _rewritten(cells.count)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Flag = Annotated[int, Field(ge=0, le=1), _rewritten(cells.flag)]
ZeroStage = Annotated[int, Field(ge=0, le=3), _rewritten(cells.stage)]
Place = Annotated[str, _rewritten(cells.place)]
Kind = Annotated[str | None, _rewritten(cells.kind)]
Text = Annotated[str, BeforeValidator(lambda value: value or "")]  # blank is empty, not None

COLUMNS_NEEDED = ("gpu", "n_gpus", "layers", "hidden", "seq_len")
# Columns of the shipped table for readers alone: nothing is computed from them.
COLUMNS_TOLD = ("params_b", "tflops_per_gpu", "flops_convention", "fp8_recipe")


class PublishedRow(BaseModel):
    """One measured run; None: the source does not say."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    trust: Annotated[str, Field(pattern="^[ABC]$")] = "A"
    source: Text = ""
    source_locator: Text = ""
    model_name: Text = ""
    layers: Count | None = None
    hidden: Count | None = None
    ffn: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    vocab: Count | None = None
    seq_len: Count | None = None
    gated_mlp: Flag | None = None
    tied_embeddings: Flag | None = None
    moe: Kind = None
    gpu: Annotated[str, _rewritten(cells.gpu)]
    gpu_mem_gb: Amount | None = None
    n_gpus: Count | None = None
    gpus_per_node: Count | None = None
    intra_node: str | None = None
    inter_node: str | None = None
    dp: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    vpp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    sequence_parallel: Flag | None = None
    zero_stage: ZeroStage | None = None
    micro_batch: Count | None = None
    grad_accum: Count | None = None
    global_batch: Count | None = None
    precision: Annotated[str, _rewritten(cells.precision)] | None = None
    recompute: Annotated[str, _rewritten(cells.recompute)] | None = None
    attention_kernel: str | None = None
    compile: Flag | None = None
    offload_optimizer: Place | None = None
    offload_param: Place | None = None
    offload_activation: Place | None = None
    framework: Text = ""
    tokens_per_s_per_gpu: Amount | None = None
    mfu_pct: Amount | None = None
    hfu_pct: Amount | None = None
    step_time_s: Amount | None = None
    peak_mem_gb: Amount | None = None
    schedule: str | None = None
    async_tp: Flag | None = None
    adapter: Kind = None
    mem_unit: str | None = None
    mem_kind: str | None = None
    notes: Text = ""

    @field_validator("*", mode="before")
    @classmethod
    def _blank_is_none(cls, value: object) -> object:
        if isinstance(value, str):
            value = value.strip()
        return None if value == "" else value

    @property
    def group(self) -> str:
        """The table that the row is from: the row's identifier without the number."""
        return self.id.rsplit("-", 1)[0]


def read_rows(path: Path | None = None) -> list[PublishedRow]:
    """The rows of a CSV file, or the shipped ones. Raises InputError: file, line and rule."""
    name = str(path) if path else "the shipped rows"
    try:
        text = read_text(path or shipped.PACKAGE / "validate" / "measured.csv")
    except InputError as error:
        raise InputError(f"cannot read rows: {error}; give a CSV file of measured rows") from None
    return list(_parsed(text, name))


def _parsed(text: str, name: str) -> Iterator[PublishedRow]:
    reader = csv.DictReader(io.StringIO(text))
    try:
        _check_columns(reader.fieldnames or (), name)
        for record in reader:
            yield _row(record, name, reader.line_num)
    except csv.Error as error:
        raise InputError(
            f"{name}, row {reader.line_num}: not CSV ({error}); quote its fields"
        ) from None


def _check_columns(columns: Sequence[str], name: str) -> None:
    """Raise InputError for columns that are doubled, missing, or named nearly as a known one.

    Other unknown columns, a user's own, are left alone.
    """
    known = (*PublishedRow.model_fields, *COLUMNS_TOLD)
    problems = []
    for index, column in enumerate(columns):
        if not column.strip():
            problems.append(f"column {index + 1} has no name")
        elif column not in known:
            if hint := did_you_mean(column.strip().lower(), known):
                problems.append(f"unknown column {column!r}{hint}")
        elif column in columns[:index]:
            problems.append(f"the column {column!r} is there twice")
    missing = [column for column in COLUMNS_NEEDED if column not in columns]
    if missing:
        problems.append(f"the header lacks {', '.join(missing)}")
    if problems:
        stop = "" if problems[-1].endswith("?") else ";"
        problems[-1] += f"{stop} write columns of the shipped bigplan/validate/measured.csv"
        raise InputError("\n".join(f"{name}: {problem}" for problem in problems))


def _row(record: dict[str | None, object], name: str, number: int) -> PublishedRow:
    place = f"{name}, row {number}"
    if None in record:
        raise InputError(
            f"{place} has more fields than the header has columns; quote fields that hold commas"
        )
    # By default the file's name stands for the table, as an identifier's first part does.
    defaults = {"id": f"{Path(name).stem}-{number}", "source": Path(name).name, "trust": "A"}
    for column, default in defaults.items():
        if not str(record.get(column) or "").strip():
            record[column] = default
    try:
        return PublishedRow.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        column = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"{place}, column {column}: {quoted(first['input'])} is not valid "
            f"({first['msg']}); correct it or leave it blank"
        ) from None
