"""Writes the token files of one folder, as parts of documents come."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from bigplan.data.prepared import (
    DOCUMENTS,
    INDEX,
    MASK,
    TOKENIZER,
    TOKENS,
    VERSION,
    Dtype,
    PreparedIndex,
    Source,
    narrowest,
)
from bigplan.data.tokenizer import Tokenizer
from bigplan.errors import InputError, printable


@dataclass(slots=True)
class _File:
    """A file that is only appended to, and its digest."""

    stream: BinaryIO
    digest: Any = field(default_factory=hashlib.sha256)

    def write(self, content: NDArray[Any]) -> None:
        """Append an array's bytes."""
        data = content.tobytes()
        self.stream.write(data)
        self.digest.update(data)

    def close(self) -> str:
        """Write the file to the drive; return the digest of its contents."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()
        return str(self.digest.hexdigest())


class Packer:
    """Tokens of documents, packed back to back into a folder's files.

    `limit`: a model and its vocabulary; larger ids are refused (InputError).
    """

    paired = False  # documents are pairs (pairs.py)
    left_out = 0  # such pairs that were too long
    shortest = 0  # tokens of the shortest of these

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, *, masked: bool, limit: tuple[str, int] | None
    ) -> None:
        self._folder, self._tokenizer, self._limit = folder, tokenizer, limit
        self._dtype: Dtype = narrowest(tokenizer.vocabulary)
        folder.mkdir(parents=True)
        names = [TOKENS, DOCUMENTS, *([MASK] if masked else [])]
        self._files = {name: _File((folder / name).open("wb")) for name in names}
        self._bits = np.empty(0, dtype=np.bool_)  # fewer than eight, which do not yet fill a byte
        self._sources: list[Source] = []
        self._path = ""
        self._counts = [0, 0]  # documents and tokens before this source
        self.tokens = self.targets = self.documents = 0
        self.largest = tokenizer.end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.stream.close()

    def begin(self, path: Path) -> None:
        """Parts added from now on belong to this source."""
        self._end_source()
        self._path, self._counts = str(path), [self.documents, self.tokens]

    def add(self, ids: NDArray[Any], *, counts: bool, ends: bool) -> None:
        """Append a part's ids, and the end token after a document's last part."""
        if len(ids):
            self.largest = max(self.largest, int(ids.max()))
            self._check(ids)
        if ends:
            ids = np.append(ids, np.array([self._tokenizer.end], dtype=ids.dtype))
        self._files[TOKENS].write(ids.astype(np.dtype(self._dtype).newbyteorder("<")))
        self.tokens += len(ids)
        self.targets += len(ids) * counts
        if MASK in self._files:
            self._mask(len(ids), counts)
        if ends:
            self.documents += 1
            self._files[DOCUMENTS].write(np.array([self.tokens], dtype="<u8"))

    def _check(self, ids: NDArray[Any]) -> None:
        if self._limit is not None and self.largest >= self._limit[1]:
            model, vocabulary = self._limit
            raise InputError(
                f"{self._path} has token {int(ids.max())}, and {model} has a vocabulary of "
                f"{vocabulary} (0 to {vocabulary - 1}): use this model's own tokenizer"
            )

    def _mask(self, count: int, counts: bool) -> None:
        bits = np.concatenate((self._bits, np.full(count, counts)))
        whole = len(bits) // 8 * 8
        self._files[MASK].write(np.packbits(bits[:whole], bitorder="little"))
        self._bits = bits[whole:]

    def _end_source(self) -> None:
        documents, tokens = self.documents - self._counts[0], self.tokens - self._counts[1]
        if documents:
            self._sources.append(
                Source(path=printable(self._path), documents=documents, tokens=tokens)
            )

    def finish(self) -> PreparedIndex:
        """Write all files to the drive, the index last."""
        self._end_source()
        if MASK in self._files:
            self._files[MASK].write(np.packbits(self._bits, bitorder="little"))
        checksums = {name: file.close() for name, file in self._files.items()}
        if self._tokenizer.file is not None:
            shutil.copyfile(self._tokenizer.file, self._folder / TOKENIZER)
            checksums[TOKENIZER] = self._tokenizer.name
        index = PreparedIndex(
            version=VERSION,
            dtype=self._dtype,
            tokens=self.tokens,
            targets=self.targets,
            documents=self.documents,
            tokenizer=self._tokenizer.name,
            vocabulary=self._tokenizer.vocabulary,
            largest=self.largest,
            end_of_document=self._tokenizer.end,
            paired=self.paired,
            left_out=self.left_out,
            sources=tuple(self._sources),
            checksums=checksums,
        )
        (self._folder / INDEX).write_text(json.dumps(index.model_dump(), indent=2) + "\n")
        sync([*(path for path in self._folder.iterdir()), self._folder])
        return index


def sync(paths: Iterable[Path]) -> None:
    """Flush files and folders to the drive."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
