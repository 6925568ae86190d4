"""Numbers in fp32 as terms that 16 bits hold."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from bigplan.runtime.constants import terms_of, values_of

FINE = st.floats(-1e4, 1e4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-20)


@given(st.lists(FINE, min_size=1, max_size=9))
def test_terms_in_bf16_add_up_to_every_bit(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    stored = terms_of(values).bfloat16()
    assert stored.shape == (3, len(numbers))
    assert torch.equal(values_of(stored), values)


@given(st.lists(FINE, min_size=1, max_size=9))
def test_terms_in_fp16_lose_what_is_smaller_than_its_smallest_number(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    found = values_of(terms_of(values).half())
    assert bool(((found - values).abs() <= 3 * 2.0**-25).all())
