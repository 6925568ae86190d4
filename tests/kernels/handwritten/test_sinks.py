"""Sinks counted in a result, against fp64: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.kernels.handwritten import sinks
from tests.examples import examples
from tests.kernels.generated import random

# Roundings of fp32, with approximate exp and log; one of bf16, where the interpreter cuts bits off.
APART = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


@given(
    st.tuples(
        st.integers(1, 2), st.integers(1, 5), st.sampled_from((1, 3, 17)), st.sampled_from((1, 64))
    ),
    st.sampled_from(tuple(APART)),
    st.integers(0, 9),
)
@settings(max_examples=examples(20), derandomize=True, deadline=None)
def test_results_and_sums_count_sinks(
    shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int
) -> None:
    batch, length, heads, _ = shape
    out, by_head = random(seed, *shape, dtype=dtype), random(seed + 1, heads, dtype=dtype)
    sums = random(seed + 2, batch, heads, length) * 20  # some sinks take all, some nothing
    usual, sink = sums.double(), by_head.double()[:, None]
    whole = torch.logaddexp(usual, sink)
    expected = out.double() * (usual - whole).exp().transpose(1, 2)[..., None]
    sinks.count_(out, sums, by_head)
    torch.testing.assert_close(sums.double(), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=APART[dtype], atol=1e-5)
