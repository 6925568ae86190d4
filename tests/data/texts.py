"""Sources for the packer's tests, and what is in a prepared folder, read the plain way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bigplan.data.prepared import DOCUMENTS, MASK, TOKENS, open_tokens, read_index

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Document:
    """Ids, its end included, and which of them the loss counts."""

    ids: list[int]
    counts: list[bool]

    @property
    def text(self) -> str:
        """Of byte tokens, without the end."""
        return bytes(self.ids[:-1]).decode()


def documents(folder: Path) -> list[Document]:
    """All documents, from the files themselves."""
    index = read_index(folder)
    ids = np.frombuffer((folder / TOKENS).read_bytes(), dtype=f"<{np.dtype(index.dtype).str[1:]}")
    counts = np.ones(len(ids), dtype=bool)
    if index.masked:
        bits = np.frombuffer((folder / MASK).read_bytes(), dtype=np.uint8)
        counts = np.unpackbits(bits, bitorder="little")[: len(ids)].astype(bool)
    ends = np.frombuffer((folder / DOCUMENTS).read_bytes(), dtype="<u8").tolist()
    assert len(ids) == index.tokens == len(open_tokens(folder)) == (ends[-1] if ends else 0)
    assert int(counts.sum()) == index.targets
    starts = [0, *ends[:-1]]
    return [
        Document(ids[a:b].tolist(), counts[a:b].tolist()) for a, b in zip(starts, ends, strict=True)
    ]


def write_texts(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    """A JSONL file of plain documents."""
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def write_pairs(path: Path, pairs: Sequence[Pair]) -> Path:
    """A JSONL file of prompts and responses."""
    rows = ({"prompt": prompt, "response": response, "id": 7} for prompt, response in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    """A JSONL file of these objects."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
