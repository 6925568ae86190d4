"""Sources to a prepared folder, which is written under another name and renamed when complete."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bigplan.data.packer import Packer, sync
from bigplan.data.pairs import WholePairs
from bigplan.data.preferences import PairFields
from bigplan.data.prepared import FILES, INDEX, PARTS, PreparedIndex
from bigplan.data.sources import (
    BLOCK,
    Fields,
    Format,
    Layout,
    TextPart,
    find_sources,
    format_of,
    read_parts,
)
from bigplan.data.tokenizer import Tokenizer, load_tokenizer
from bigplan.errors import InputError
from bigplan.paths import exists, is_dir, is_file
from bigplan.units import counted

BATCH = 1024  # parts tokenised at a time; fewer if they make a BLOCK of text

OnProgress = Callable[[int, int, int], None]  # bytes read, bytes in all, tokens written


@dataclass(frozen=True, slots=True)
class Preparation:
    """What to prepare, and how."""

    sources: tuple[Path, ...]
    fields: Layout | None = None  # None: text, in formats that have fields
    form: Format | None = None  # None: by each file's suffix
    tokenizer: Path | None = None  # None: bytes
    end_of_document: str | None = None
    validation_fraction: float = 0.0
    limit: tuple[str, int] | None = None  # a model's name and its vocabulary
    longest_pair: int | None = None  # tokens; longer pairs of responses are left out

    @property
    def paired(self) -> bool:
        """Whether rows have a chosen and a rejected response."""
        return isinstance(self.fields, PairFields)


def prepare(
    wanted: Preparation, out: Path, *, force: bool = False, progress: OnProgress | None = None
) -> dict[str, PreparedIndex]:
    """Write the folder, or with a fraction its parts train and validation; return indices by part.

    `force` replaces an older prepared folder. Memory does not grow with the sources, except for the
    longest document of a JSONL or Parquet file. Raises InputError, RefusedError; then no new file
    is left, and older ones are unchanged.
    """
    fraction = wanted.validation_fraction
    if not 0 <= fraction < 1:
        raise InputError(
            f"--validation-fraction {fraction}: a share of the documents, 0 or more and below 1, "
            "such as 0.01"
        )
    paths = find_sources(wanted.sources)
    forms = [format_of(path, wanted.form) for path in paths]
    if wanted.fields is not None and set(forms) == {"text"}:
        raise InputError(
            f"{paths[0]} is read as text, which has no fields; leave --field, --prompt-field, "
            "--response-field, --messages-field, --chosen-field and --rejected-field out, or say "
            "with --format what the file is"
        )
    tokenizer = load_tokenizer(wanted.tokenizer, wanted.end_of_document)
    _check_target(out, paths, force=force)
    reads = _Reads(wanted, list(zip(paths, forms, strict=True)), tokenizer, progress)
    with _aside(out) as folder:
        parts = PARTS if fraction else ("",)
        with ExitStack() as stack:
            packers = [
                stack.enter_context(
                    Packer(
                        folder / part if part else folder / "all",
                        tokenizer,
                        masked=wanted.fields is not None and wanted.fields.masked,
                        limit=wanted.limit,
                    )
                )
                for part in parts
            ]
            _pack(reads, packers)
            indices = dict(zip(parts, _finished(packers, parts), strict=True))
        _into_place(folder if fraction else folder / "all", out)
    return indices


def _check_target(out: Path, sources: list[Path], *, force: bool) -> None:
    """Raise InputError where the folder must not be written."""
    if not exists(out):
        return
    if not is_dir(out):
        raise InputError(f"--out {out} is a file: name a folder")
    there = [path for path in out.rglob("*") if not is_dir(path)]
    if not any(out.iterdir()):
        return
    if not force:
        raise InputError(f"--out {out} is not empty: name another folder, or add --force")
    ours = {out / part / name for part in ("", *PARTS) for name in FILES}
    foreign = sorted(path for path in there if path not in ours)
    prepared = any(is_file(out / part / INDEX) for part in ("", *PARTS))
    if foreign or not prepared:
        found = f"holds {foreign[0]}" if foreign else f"has no {INDEX}"
        raise InputError(
            f"--out {out} {found}, which was not prepared by bigplan, so --force does not "
            "replace it: name another folder"
        )
    inside = [path for path in sources if out.resolve() in path.resolve().parents]
    if inside:
        raise InputError(f"--out {out} holds the source {inside[0]}: name another folder")


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, which is removed afterwards in any case.

    That of a process that was killed is removed by the next one for the same `out`.
    """
    try:
        parent = out.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        _remove_killed(parent.glob(f".{glob.escape(out.name)}.????????.partial"))
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=parent))
        held = _held(folder)
    except OSError as error:
        raise InputError(
            f"--out {out} cannot be created: {error.strerror}; name another folder"
        ) from None
    try:
        yield folder
    except OSError as error:
        raise InputError(
            f"--out {out} cannot be written: {error.strerror}; nothing was left behind. Make "
            "room there, or name another folder"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            os.close(held)


def _held(folder: Path) -> int | None:
    """The folder, locked as long as this process lives; None where another has it, or no locks."""
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def _remove_killed(folders: Iterable[Path]) -> None:
    for folder in folders:
        if (file := _held(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(file)


def _into_place(folder: Path, out: Path) -> None:
    """Rename to `out`; an older folder there is removed after the new one is in its place."""
    folder.chmod(0o777 & ~_umask())
    sync(path for path in folder.rglob("*"))
    old = out.with_name(f".{out.name}.{os.getpid()}.replaced") if exists(out) else None
    if old is not None:
        out.rename(old)
    try:
        folder.rename(out)
    except OSError:
        if old is not None:
            old.rename(out)
        raise
    sync([out.absolute().parent])
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@dataclass(frozen=True, slots=True)
class _Reads:
    """The files in order, with a callback for progress."""

    wanted: Preparation
    files: list[tuple[Path, Format]]
    tokenizer: Tokenizer
    progress: OnProgress | None

    def batches(self) -> Iterator[tuple[Path, list[TextPart]]]:
        """Parts to be tokenised together, all of one file."""
        for path, form in self.files:
            batch: list[TextPart] = []
            characters = 0
            fields = self.wanted.fields or Fields()
            parts = read_parts(path, form, fields, self.wanted.validation_fraction)
            for part in parts:
                batch.append(part)
                characters += len(part.text)
                if len(batch) == BATCH or characters >= BLOCK:
                    yield path, batch
                    batch, characters = [], 0
            if batch:
                yield path, batch


def _pack(reads: _Reads, packers: list[Packer]) -> None:
    total = sum(path.stat().st_size for path, _ in reads.files)
    before, current, wanted = 0, None, reads.wanted
    into: list[Packer] | list[WholePairs] = packers
    if wanted.paired:
        into = [WholePairs(packer, wanted.longest_pair) for packer in packers]
        for packer in packers:
            packer.paired = True
    for path, batch in reads.batches():
        if path != current:
            before += current.stat().st_size if current else 0
            current = path
            for packer in packers:
                packer.begin(path)
        for part, ids in zip(
            batch, reads.tokenizer.encode([part.text for part in batch]), strict=True
        ):
            into[part.held_out].add(ids, counts=part.counts, ends=part.ends)
        if reads.progress is not None:
            reads.progress(before + batch[-1].position, total, sum(p.tokens for p in packers))


def _finished(packers: list[Packer], parts: tuple[str, ...]) -> list[PreparedIndex]:
    for packer, part in zip(packers, parts, strict=True):
        if packer.documents == 0:
            if packer.left_out:
                raise InputError(
                    f"all {counted(packer.left_out, 'pair')} for {part or 'training'} are longer "
                    f"than --longest-pair: give {packer.shortest} at least, the tokens of the "
                    "shortest one, and as long sequences"
                )
            raise InputError(
                f"no document is left for {part or 'training'}: give more text, or change "
                "--validation-fraction"
            )
    return [packer.finish() for packer in packers]
