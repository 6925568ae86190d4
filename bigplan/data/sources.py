"""Documents of text, JSONL and Parquet files, a part at a time: never a whole file in memory."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from bigplan.data.tokenizer import require
from bigplan.errors import InputError, quoted
from bigplan.paths import is_dir, is_file
from bigplan.spec.files.reading import require_regular

Format = Literal["text", "jsonl", "parquet"]
SUFFIXES: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
BLOCK = 1 << 20  # bytes of a text file that are tokenised at a time
ROWS = 256  # of a Parquet file, decoded at a time
HASHED = 8  # bytes of a digest that decide whether a document is held out


@dataclass(frozen=True, slots=True)
class TextPart:
    """A part of a document's text."""

    text: str
    counts: bool = True  # whether the loss counts it
    ends: bool = True  # the document's last part
    held_out: bool = False  # for validation
    position: int = 0  # approximate bytes of the file read so far


class Span(NamedTuple):
    """Text that is tokenised by itself, and whether the loss counts it."""

    text: str
    counts: bool = True


Document = tuple[Span, ...]


class Layout(Protocol):
    """How a JSON object or a Parquet row holds its documents."""

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that every row must have."""

    @property
    def masked(self) -> bool:
        """Whether the loss leaves some tokens out."""

    def documents(self, row: Mapping[str, object], where: str) -> list[Document]:
        """Those of a row with these fields; InputError, which says where, for another type."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields with text: one document."""

    text: str = "text"
    prompt: str | None = None  # if set, the loss counts the response alone
    response: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """See Layout."""
        if self.prompt is not None and self.response is not None:
            return self.prompt, self.response
        return (self.text,)

    @property
    def masked(self) -> bool:
        """See Layout."""
        return self.prompt is not None

    def documents(self, row: Mapping[str, object], where: str) -> list[Document]:
        """See Layout."""
        *prompts, last = (
            require_text(row[name], f"field {quoted(name)}", where) for name in self.names
        )
        return [(*(Span(text, counts=False) for text in prompts), Span(last))]


def _parts(documents: list[Document], fraction: float, position: int) -> Iterator[TextPart]:
    """A row's documents; those of rows with equal texts are all held out, or none is."""
    out = _held_out((span.text for document in documents for span in document), fraction)
    for *spans, last in documents:
        for text, counts in spans:
            yield TextPart(text, counts, ends=False, held_out=out, position=position)
        yield TextPart(*last, held_out=out, position=position)


def _held_out(texts: Iterable[str], fraction: float) -> bool:
    if fraction == 0:
        return False
    digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=HASHED).digest()
    return int.from_bytes(digest) < fraction * (1 << (8 * HASHED))


def find_sources(paths: tuple[Path, ...]) -> list[Path]:
    """The files; for a folder, all files with a known suffix, by name.

    Raises InputError, also for a file given twice, because its text would count twice.
    """
    found: list[Path] = []
    for path in paths:
        if is_dir(path):
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
            if not inside:
                raise InputError(
                    f"{path} holds no file that ends in {', '.join(SUFFIXES)}: name the files"
                )
            found += [p for p in inside if is_file(p)]
        else:
            require_regular(path)
            found.append(path)
    seen: dict[Path, Path] = {}
    for path in found:
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            also = "" if first == path else f", the other time as {first}"
            raise InputError(f"{path} is there twice{also}; name it once, or its folder alone")
    return found


def format_of(path: Path, wanted: Format | None) -> Format:
    """The file's format by its suffix, unless it is given. InputError for an unknown suffix."""
    known = wanted or SUFFIXES.get(path.suffix.lower())
    if known is None:
        raise InputError(
            f"{path}: the suffix {path.suffix or '(none)'} says no format; "
            "add --format text, jsonl or parquet"
        )
    return known


def read_parts(path: Path, form: Format, fields: Layout, fraction: float) -> Iterator[TextPart]:
    """All parts of the file's documents, in order. Raises InputError with file and line."""
    try:
        match form:
            case "text":
                yield from _text(path, fraction)
            case "jsonl":
                yield from _jsonl(path, fields, fraction)
            case "parquet":
                yield from _parquet(path, fields, fraction)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def _text(path: Path, fraction: float) -> Iterator[TextPart]:
    """A text file is one document; its last lines, a document of their own, are held out."""
    size = path.stat().st_size
    if size == 0:
        raise InputError(f"{path} is empty: leave it out")
    cut = _line_start(path, round(size * (1 - fraction))) if fraction else size
    line = 1
    for start, stop in ((0, cut), (cut, size)):
        for block, position in _blocks(path, start, stop, line):
            line += block.count("\n")
            yield TextPart(block, ends=position == stop, held_out=start > 0, position=position)


def _line_start(path: Path, offset: int) -> int:
    """The first start of a line at or after `offset`, or the end of the file."""
    with path.open("rb") as file:
        file.seek(max(0, offset - 1))
        while block := file.read(BLOCK):
            found = block.find(b"\n")
            if found >= 0:
                return file.tell() - len(block) + found + 1
        return file.tell()


def _blocks(path: Path, start: int, stop: int, line: int) -> Iterator[tuple[str, int]]:
    """Text of about a block each, cut after a line where there is one, and the block's end.

    Tokens never span two blocks, so a tokenizer meets an artificial edge once in BLOCK bytes.
    """
    # A byte-order mark at the start of a file is not text.
    decoder = codecs.getincrementaldecoder("utf-8" if start else "utf-8-sig")()
    rest, position = "", start
    with path.open("rb") as file:
        file.seek(start)
        while position < stop:
            raw = file.read(min(BLOCK, stop - position))
            if not raw:
                raise InputError(f"{path} became shorter while it was read; try again")
            position += len(raw)
            try:
                rest += decoder.decode(raw, final=position == stop)
            except UnicodeDecodeError as error:
                good = error.object[: error.start]
                raise _not_utf8(path, line + rest.count("\n") + good.count(b"\n")) from None
            end = len(rest) if position == stop else rest.rfind("\n") + 1 or len(rest)
            block, rest = rest[:end], rest[end:]
            line += block.count("\n")
            if block or position == stop:
                yield block, position


def _not_utf8(path: Path, line: int) -> InputError:
    return InputError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8")


def _jsonl(path: Path, fields: Layout, fraction: float) -> Iterator[TextPart]:
    position = documents = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            position += len(raw)
            if not raw.strip():
                continue
            where = f"{path}:{number}"
            row = _object(_parsed(path, number, raw), where, fields)
            documents += 1
            yield from _parts(fields.documents(row, where), fraction, position)
    if documents == 0:
        raise InputError(f"{path} is empty: leave it out")


def _parsed(path: Path, number: int, raw: bytes) -> object:
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise _not_utf8(path, number) from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}:{number}: not JSON: {error}; every line must be one JSON object"
        ) from None


def _object(row: object, where: str, fields: Layout) -> dict[str, object]:
    if not isinstance(row, dict):
        raise InputError(
            f"{where}: a JSON {type(row).__name__}; every line must be an object such as "
            f'{{"{fields.names[0]}": "..."}}'
        )
    for name in fields.names:
        _require_field(where, name, list(row), name in row)
    return row


def _require_field(where: str, name: str, there: list[str], is_there: bool) -> None:
    if not is_there:
        known = ", ".join(map(str, there)) or "nothing"
        raise InputError(
            f"{where}: no field {quoted(name)}; it has {known}: name the text's with --field, "
            "with --prompt-field and --response-field, a conversation's with --messages-field, or "
            "two responses' with --chosen-field and --rejected-field"
        )


def require_text(value: object, name: str, where: str) -> str:
    """The value; InputError where it is no text."""
    if not isinstance(value, str):
        raise InputError(
            f"{where}: {name} is {str(value)[:40]!r}, not text: mend it, or name another field"
        )
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate such as "\ud800" is JSON, but no text
        raise InputError(
            f"{where}: {name} holds a lone surrogate, which is no text: mend it"
        ) from None
    return value


def _parquet(path: Path, fields: Layout, fraction: float) -> Iterator[TextPart]:
    require("pyarrow", f"reading {path}")
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path, memory_map=False, pre_buffer=False) as file:
            yield from _rows(path, file, fields, fraction)
    except pyarrow.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: not a whole Parquet file: {reason}") from None


def _rows(path: Path, file: Any, fields: Layout, fraction: float) -> Iterator[TextPart]:
    rows, size, done = file.metadata.num_rows, path.stat().st_size, 0
    columns = [str(name) for name in file.schema_arrow.names]
    for name in fields.names:
        _require_field(str(path), name, columns, name in columns)
    if rows == 0:
        raise InputError(f"{path} is empty: leave it out")
    for batch in file.iter_batches(batch_size=ROWS, columns=list(fields.names)):
        for values in zip(*(batch.column(name) for name in fields.names), strict=True):
            done += 1
            row = {n: value.as_py() for n, value in zip(fields.names, values, strict=True)}
            documents = fields.documents(row, f"{path}: row {done}")
            yield from _parts(documents, fraction, size * done // rows)
