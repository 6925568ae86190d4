"""Text to token ids: bytes, or a Hugging Face tokenizer.json."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bigplan.data.prepared import BYTE_VOCABULARY
from bigplan.errors import InputError, RefusedError, quoted
from bigplan.paths import is_dir, is_file
from bigplan.spec.files.reading import INDEX, read_bytes, read_json

BYTE_END = 255  # no UTF-8 text has this byte
# Usual names of the token after a document, where no file beside the tokenizer names it.
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


class Tokenizer(Protocol):
    """Ids of texts."""

    @property
    def name(self) -> str:
        """`bytes`, or the digest of the file."""

    @property
    def vocabulary(self) -> int:
        """One more than the largest id."""

    @property
    def end(self) -> int:
        """The id that ends a document."""

    @property
    def file(self) -> Path | None:
        """The file it was read from, if any."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The ids of every text, without special tokens around it."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """The bytes of the UTF-8 text."""

    name: str = "bytes"
    vocabulary: int = BYTE_VOCABULARY
    end: int = BYTE_END
    file: Path | None = None

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """See Tokenizer."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


@dataclass(frozen=True, slots=True)
class FromFile:
    """A Hugging Face `tokenizers` file."""

    inner: Any
    name: str
    vocabulary: int
    end: int
    file: Path | None

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """See Tokenizer."""
        encodings = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def require(package: str, what: str) -> None:
    """Raise RefusedError that names the extra to install where the package is missing."""
    if find_spec(package) is None:
        raise RefusedError(
            f"{what} needs {package}, which is not installed; run: pip install 'bigplan[data]'"
        )


def load_tokenizer(path: Path | None, end: str | None) -> Tokenizer:
    """The tokenizer of a file, or of a folder that holds tokenizer.json; None: bytes.

    `end` is the token after every document. None takes eos_token of tokenizer_config.json beside
    the file, else the one usual name in the vocabulary. Raises InputError, RefusedError.
    """
    if path is None:
        if end is not None:
            raise InputError(
                f"--end-of-document {end}: byte {BYTE_END} ends a document of bytes; "
                "name a --tokenizer, or leave the option out"
            )
        return ByteTokenizer()
    require("tokenizers", f"reading {path}")
    file = path / "tokenizer.json" if is_dir(path) else path
    inner, content = _read(file)
    # Overrides the file's own settings: texts are neither truncated nor padded.
    inner.no_truncation()
    inner.no_padding()
    ids: dict[str, int] = inner.get_vocab(with_added_tokens=True)
    if not ids:
        raise InputError(f"{file} has an empty vocabulary; name a trained tokenizer")
    digest = hashlib.sha256(content).hexdigest()
    return FromFile(inner, digest, max(ids.values()) + 1, _end(file, ids, end), file)


def _read(file: Path) -> tuple[Any, bytes]:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    try:
        content = read_bytes(file, INDEX)
    except InputError as error:
        raise InputError(
            f"tokenizer {error}; name a tokenizer.json, or a folder that holds one"
        ) from None
    try:
        return HuggingFaceTokenizer.from_buffer(content), content
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise InputError(
            f"{file} is no file of Hugging Face's tokenizers ({error}): name a tokenizer.json"
        ) from None


def _end(file: Path, ids: dict[str, int], wanted: str | None) -> int:
    if wanted is None:
        usual = [name for name in USUAL_ENDS if name in ids]
        wanted = _configured(file) or (usual[0] if len(usual) == 1 else None)
        if wanted is None:
            found = f"has {' and '.join(usual)}" if usual else "has none of the usual ones"
            raise InputError(
                f"no tokenizer_config.json beside {file} says which token ends a document, and "
                f"its vocabulary {found}: add --end-of-document TOKEN"
            )
    if wanted not in ids:
        raise InputError(
            f"end of document {quoted(wanted)} is not in the vocabulary of {file}: "
            "name one of its tokens with --end-of-document"
        )
    return ids[wanted]


def _configured(file: Path) -> str | None:
    """The eos_token of tokenizer_config.json, which is text or an object with its text."""
    path = file.with_name("tokenizer_config.json")
    if not is_file(path):
        return None
    try:
        token = read_json(path).data.get("eos_token")
    except (InputError, AttributeError) as error:
        raise InputError(
            f"{path} cannot be read ({error}): mend it, or add --end-of-document TOKEN"
        ) from None
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
