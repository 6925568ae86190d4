"""A prepared folder: tokens packed back to back, memory-mapped. A plain file's bytes work as well.

index.json      what is in the others (`Index`)
tokens.bin      little-endian unsigned integers, document after document, each with its end
mask.bin        a bit a token, lowest first: 1 where the loss counts it; there if not all count
documents.bin   uint64 a document: the tokens up to and including its end
tokenizer.json  a copy of the tokenizer; not for bytes
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from bigplan.errors import InputError
from bigplan.paths import exists, is_dir, is_file
from bigplan.spec.files.document import Spec, validate
from bigplan.spec.files.reading import read_json, require_regular

VERSION = 1
INDEX, TOKENS, MASK = "index.json", "tokens.bin", "mask.bin"
DOCUMENTS, TOKENIZER = "documents.bin", "tokenizer.json"
FILES = (INDEX, TOKENS, MASK, DOCUMENTS, TOKENIZER)
BYTE_VOCABULARY = 256
PARTS = ("train", "validation")  # folders of a prepared split
ENDS = 1 << 20  # bytes of a plain file's beginning and end that are in its fingerprint
UNPREPARED = (".jsonl", ".ndjson", ".parquet")
LOOKED_AT = 8192  # bytes of a file's beginning, among which a text has no zero

Dtype = Literal["uint8", "uint16", "uint32"]
WIDTHS: dict[Dtype, int] = {"uint8": 1, "uint16": 2, "uint32": 4}


class Source(Spec):
    """One input file."""

    path: str
    documents: int
    tokens: int
    """of its documents, end tokens included"""


class PreparedIndex(Spec):
    """What a prepared folder holds."""

    version: int
    dtype: Dtype
    tokens: int
    targets: int
    """tokens whose loss counts; all of them without a mask"""
    documents: int
    tokenizer: str
    """`bytes`, or the SHA-256 of tokenizer.json"""
    vocabulary: int
    """ids that the tokenizer may give, from 0"""
    largest: int
    """the largest id that occurs"""
    end_of_document: int
    """the id after every document"""
    paired: bool = Field(default=False, exclude_if=lambda paired: not paired)
    """documents are a chosen and a rejected response in turn, each with its prompt"""
    left_out: int = Field(default=0, exclude_if=lambda pairs: not pairs)
    """such pairs that were longer than --longest-pair"""
    sources: tuple[Source, ...]
    checksums: dict[str, str]
    """SHA-256 of the other files"""

    @property
    def masked(self) -> bool:
        """Whether there are tokens whose loss does not count."""
        return MASK in self.checksums

    def sizes(self) -> dict[str, int]:
        """Bytes of the binary files."""
        sizes = {TOKENS: self.tokens * WIDTHS[self.dtype], DOCUMENTS: 8 * self.documents}
        return sizes | ({MASK: -(-self.tokens // 8)} if self.masked else {})


def narrowest(vocabulary: int) -> Dtype:
    """The smallest dtype that holds every id below `vocabulary`."""
    return next(d for d, width in WIDTHS.items() if vocabulary <= 1 << (8 * width))


@dataclass(frozen=True, slots=True)
class Tokens:
    """A token sequence, memory-mapped: only what is read takes memory."""

    path: Path
    ids: NDArray[Any]
    bits: NDArray[np.uint8] | None  # a bit a token: whether the loss counts it; None: every token
    largest: int  # the largest id
    ends: NDArray[np.uint64] | None = None  # of each document, behind its end token; None: unknown
    paired: bool = False  # documents are pairs (pairs.py)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    def fingerprint(self) -> str:
        """A short digest of what training reads: of a prepared folder the checksums in its index.

        Of other files their length and their first and last MiB, as some take minutes to read.
        Raises InputError.
        """
        found = hashlib.sha256(f"{len(self)}".encode())
        if is_dir(self.path):
            sums = read_index(self.path).checksums
            found.update(f"{sums.get(TOKENS)} {sums.get(MASK)}".encode())
        else:
            found.update(self.ids[:ENDS].tobytes())
            found.update(self.ids[-ENDS:].tobytes())
        return found.hexdigest()[:16]

    def counted(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Whether the loss counts each of the tokens start, ..., stop - 1."""
        if self.bits is None:
            return np.ones(stop - start, dtype=np.bool_)
        first = start // 8
        bits = np.unpackbits(self.bits[first : -(-stop // 8)], bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].astype(np.bool_)


def open_tokens(path: Path) -> Tokens:
    """A prepared folder, or any other file's bytes as tokens. Raises InputError.

    Sizes are checked, checksums are not: that would read everything (`check_folder` does).
    """
    if is_dir(path):
        return _open_folder(path)
    if path.suffix.lower() in UNPREPARED:
        raise InputError(
            f"data {path} is {path.suffix[1:].upper()}, not text or a prepared folder: "
            f"run `bigplan data prepare {path} --out FOLDER` and name that folder"
        )
    if exists(path):
        require_regular(path)
    ids = _mapped(path, "uint8")
    if not ids[:LOOKED_AT].all():
        raise InputError(
            f"data {path} has a zero byte among its first {LOOKED_AT:,}, so it is no text (tokens "
            "of another tool, an archive, weights?): name a text file, or a folder that "
            "`bigplan data prepare` made of one"
        )
    # All other bytes may occur; a check would read the whole file.
    return Tokens(path, ids, None, BYTE_VOCABULARY - 1)


def _mapped(path: Path, dtype: Dtype) -> NDArray[Any]:
    try:
        return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:  # numpy: "cannot mmap an empty file"
        why = error.strerror if isinstance(error, OSError) else "it is empty"
        here = "" if path.is_absolute() else f"; looked for in {Path.cwd()}"
        raise InputError(
            f"data {path} cannot be read ({why}{here}): "
            "name a prepared folder or a text file that is not empty, or `bundled`"
        ) from error


def _open_folder(folder: Path) -> Tokens:
    index = read_index(folder)
    for name, size in index.sizes().items():
        found = (folder / name).stat().st_size if is_file(folder / name) else 0
        if found != size:
            raise InputError(
                f"{folder / name} has {found} bytes, {INDEX} says {size}: a copy of the folder is "
                "not whole; copy or prepare it again"
            )
    bits = np.memmap(folder / MASK, dtype=np.uint8, mode="r") if index.masked else None
    ends = np.memmap(folder / DOCUMENTS, dtype="<u8", mode="r")
    ids = _mapped(folder / TOKENS, index.dtype)
    return Tokens(folder, ids, bits, index.largest, ends, index.paired)


def read_index(folder: Path) -> PreparedIndex:
    """The folder's index. Raises InputError where it is not one of bigplan's."""
    path = folder / INDEX
    if not is_file(path):
        parts = [str(folder / part) for part in PARTS if is_file(folder / part / INDEX)]
        hint = f"; name {' or '.join(parts)}" if parts else ""
        raise InputError(
            f"{folder} holds no {INDEX}, so `bigplan data prepare` did not write it"
            f"{hint or ': prepare the texts in it first'}"
        )
    data = read_json(path).data
    version = data.get("version") if isinstance(data, Mapping) else None
    if version != VERSION:
        raise InputError(
            f"{path} has version {version}, this bigplan reads {VERSION}: prepare the data again"
        )
    return validate(data, PreparedIndex, str(path))


def check_vocabulary(tokens: Tokens, vocabulary: int, model: str) -> None:
    """Raise InputError where the data has ids that the model has no embedding for."""
    if tokens.largest >= vocabulary:
        raise InputError(
            f"data {tokens.path} has token {tokens.largest}, and {model} has a "
            f"vocabulary of {vocabulary} (0 to {vocabulary - 1}): use a model with a vocabulary "
            f"of at least {tokens.largest + 1}, or prepare the data with this model's tokenizer"
        )


def check_length(tokens: Tokens, sequence_length: int) -> None:
    """Raise InputError where the data is shorter than one window and its last target."""
    if len(tokens) < sequence_length + 1:
        raise InputError(
            f"data {tokens.path} has {len(tokens)} tokens, sequence_length "
            f"{sequence_length} needs at least {sequence_length + 1} (a window and "
            "the target of its last token): use more text or a shorter sequence_length"
        )


def check_targets(tokens: Tokens, first: int) -> None:
    """Raise InputError where the loss counts none of the first so many targets."""
    if tokens.bits is not None and not tokens.counted(1, min(first + 1, len(tokens))).any():
        raise InputError(
            f"data {tokens.path}: the loss counts none of its first {first:,} tokens (they are a "
            "prompt's), so it would be 0: read more of it (`batches`), or name other data"
        )


def check_folder(folder: Path) -> PreparedIndex:
    """The index, after every byte was compared with its checksum. Raises InputError."""
    index = read_index(folder)
    _open_folder(folder)
    for name, expected in index.checksums.items():
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise InputError(
                f"{folder / name} has changed since it was prepared (SHA-256 {found[:12]}..., "
                f"{INDEX} says {expected[:12]}...): prepare the data again"
            )
    return index
