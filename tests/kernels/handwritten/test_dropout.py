"""Dropout in one pass, against torch's operators: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.kernels.handwritten import dropout
from bigplan.runtime.linear.dropout import Draw, dropped
from tests.examples import examples
from tests.kernels.generated import random

WORD = st.integers(0, 2**32 - 1)


@given(
    st.tuples(st.sampled_from((1, 7, 24)), st.sampled_from((1, 16, 513, 1100))),
    st.tuples(WORD, WORD),
    st.tuples(*[st.integers(0, 5000)] * 2, st.integers(1, 9), st.integers(0, 5000)),
    st.sampled_from((0, 1, 2**40)),
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.booleans(),
)
@settings(max_examples=examples(20), derandomize=True, deadline=None)
def test_the_bits_are_those_of_torch(
    shape: tuple[int, int],
    words: tuple[int, int],
    at: tuple[int, int, int, int],
    first: int,
    dtype: torch.dtype,
    adds: bool,
) -> None:
    x, total = random(1, *shape, dtype=dtype), random(2, *shape, dtype=dtype)
    draw = Draw(torch.tensor([first], device=x.device), words, 2**31 + words[0] // 4, *at)
    ours, theirs = (total.clone() if adds else None for _ in range(2))
    found, expected = dropout.dropped(x, draw, ours), dropped(x, draw, theirs)
    assert found.data_ptr() == (found if ours is None else ours).data_ptr()
    if adds and dtype is torch.bfloat16:  # the interpreter cuts bits off where a GPU rounds
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
    else:
        assert torch.equal(found, expected)
