"""Where documents are within windows, and how long they are there."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.data.documents import begins, bounds, described, mean_piece
from bigplan.data.prepare import Preparation, prepare
from bigplan.data.prepared import Tokens
from bigplan.spec.training import Training
from tests.data.texts import write_texts
from tests.examples import examples


def tokens_of(lengths: list[int]) -> Tokens:
    """Documents so long, whose tokens are their numbers."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return Tokens(
        Path("data"), ids, None, len(lengths), np.array([*accumulate(lengths)], np.uint64)
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 40), st.data())
@settings(max_examples=examples(100), derandomize=True, deadline=None)
def test_bounds_are_where_tokens_change(
    lengths: list[int], length: int, data: st.DataObject
) -> None:
    tokens = tokens_of(lengths)
    length = min(length, len(tokens))
    start = data.draw(st.integers(0, len(tokens) - length))
    window = tokens.ids[start : start + length]
    first, end = bounds(tokens, start, length)
    for i in range(length):
        same = np.flatnonzero(window == window[i])
        assert (first[i], end[i]) == (same[0], same[-1] + 1)
    new = [i for i in range(start, start + length) if i and tokens.ids[i] != tokens.ids[i - 1]]
    if start:
        assert [start + at for at in begins(tokens, start, start + length)] == new


def test_the_mean_counts_pairs_that_see_each_other() -> None:
    """Of documents cut by windows: as many pairs as windows of equal ones so long have."""
    tokens = tokens_of([3, 5, 8, 2, 14, 1])  # 33: two windows of 16
    pieces = [3, 5, 8, 2, 14]
    assert mean_piece(tokens, 16) == sum(piece**2 for piece in pieces) / 32
    assert mean_piece(tokens_of([100]), 16) == 16


def test_a_training_knows_the_documents_of_its_data(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "texts.jsonl", ["x" * 31] * 40)  # and an end
    prepare(Preparation((source,)), tmp_path / "prepared")
    training = Training(sequence_length=128, global_batch=1, data=str(tmp_path / "prepared"))
    assert described(training) == training
    apart = training.model_copy(update={"isolate_documents": True})
    assert described(apart).document_tokens == 32
    assert described(apart).attended_length == 32
    assert apart.attended_length == 128
    for data in ("bundled", str(tmp_path / "elsewhere"), str(source)):
        unknown = apart.model_copy(update={"data": data})
        assert described(unknown).document_tokens is None
    assert described(
        apart.model_copy(update={"sequence_length": 20})
    ).document_tokens == pytest.approx(mean_piece(tokens_of([32] * 40), 20))
