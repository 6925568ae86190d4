"""Where documents begin and end within windows of packed tokens.

Attention that keeps documents apart (`training.isolate_documents`) wants for each token of a window
its document's first token, and the one behind its last. A part of a document that a window cuts off
counts as a document.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bigplan.data.pairs import PackedPairs
from bigplan.data.prepared import Tokens, check_length, open_tokens
from bigplan.errors import InputError
from bigplan.spec.files.reading import user_path
from bigplan.spec.training import Training

SAMPLED = 1024  # windows that a mean is taken over, at equal distances


def no_documents(data: object) -> str:
    """Why documents of this data cannot be kept apart."""
    return (
        f"isolate_documents: data {data} is plain text, in which no document ends; run `bigplan "
        "data prepare` on text and name its folder, or leave isolate_documents off"
    )


def check_documents(tokens: Tokens) -> None:
    """Raise InputError where it is not known which documents the tokens are of."""
    if tokens.ends is None:
        raise InputError(no_documents(tokens.path))


def pieces(tokens: Tokens, start: int, length: int) -> NDArray[np.int64]:
    """Where the documents of the tokens start ... start + length - 1 end, counted from `start`.

    The last one ends with the window.
    """
    assert tokens.ends is not None, tokens.path
    first = int(np.searchsorted(tokens.ends, np.uint64(start), side="right"))
    last = int(np.searchsorted(tokens.ends, np.uint64(start + length), side="left"))
    within = tokens.ends[first:last].astype(np.int64) - start
    return np.append(within, length)


def bounds(tokens: Tokens, start: int, length: int, padded: int = 0) -> NDArray[np.int32]:
    """Of each token of this window its document's first token, and the one behind its last.

    int32 [2, length], counted from the window's first token. Padding behind `length` up to `padded`
    counts as a document.
    """
    ends = pieces(tokens, start, length)
    if padded > length:
        ends = np.append(ends, padded)
    begins = np.concatenate(([0], ends[:-1]))
    return np.repeat(np.stack((begins, ends)), ends - begins, axis=1).astype(np.int32)


def begins(tokens: Tokens, start: int, stop: int) -> NDArray[np.int64]:
    """Which of the tokens start ... stop - 1 begin a document, counted from `start`."""
    return pieces(tokens, start - 1, stop - start + 1)[:-1] - 1


def described(training: Training) -> Training:
    """With the mean document of its data, where documents are kept apart and the data is here.

    What is stated stays.
    """
    stated = training.document_tokens is not None
    if stated or not training.isolate_documents or training.data == "bundled":
        return training
    try:
        tokens = open_tokens(user_path(training.data))
        mean = _mean(tokens, training)
    except InputError:  # the plan may be meant for another machine; it is told beside the plan
        return training
    return training.model_copy(update={"document_tokens": mean})


def _mean(tokens: Tokens, training: Training) -> float:
    """The mean document of this data; InputError where it is not for this training."""
    length = training.sequence_length
    if training.preference is not None:
        return mean_document(tokens, PackedPairs.of(tokens, length), length)
    check_length(tokens, length)
    check_documents(tokens)
    return mean_piece(tokens, length)


def mean_document(tokens: Tokens, packed: PackedPairs, length: int) -> float:
    """As mean_piece, of documents that are whole, with a sequence's padding as one of them."""
    assert tokens.ends is not None, tokens.path
    sizes = np.diff(tokens.ends.astype(np.float64), prepend=0.0)
    used = np.diff(packed.ends[packed.first[1:] - 1], prepend=0).astype(np.float64)
    squares = np.square(sizes).sum() + np.square(length - used).sum()
    return float(squares / (packed.sequences * length))


def mean_piece(tokens: Tokens, length: int) -> float:
    """Tokens of the document that a token of a window of `length` is in, on average over tokens.

    With pieces of l tokens it is the sum of l^2 over the sum of l. Windows of equal pieces so long
    have as many pairs of a token and one that it attends to. Taken over SAMPLED windows.
    """
    windows = max(1, (len(tokens) - 1) // length)
    some = np.linspace(0, windows - 1, min(windows, SAMPLED)).astype(np.int64)
    lengths = [np.diff(pieces(tokens, int(one) * length, length), prepend=0) for one in some]
    squares = sum(float(np.square(each, dtype=np.float64).sum()) for each in lengths)
    return squares / (len(some) * length)
