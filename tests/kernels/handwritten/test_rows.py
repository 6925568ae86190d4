"""Rows of experts, copied and added up by kernels: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.kernels.handwritten import rows
from bigplan.runtime.experts import dispatch as experts
from tests.examples import examples
from tests.kernels.generated import error, random

runs = settings(max_examples=examples(30), derandomize=True, deadline=None)
sizes = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3000))
# A rounding of fp32 an operation, and an approximate exp; that of bf16 is 2^-9.
APART = {torch.float32: 3e-6, torch.bfloat16: 2**-8}


def _places(tokens: int, each: int) -> experts.Places:
    return experts.route(random(3, tokens, 4), each, normalised=True)[1]


@pytest.mark.parametrize("dtype", list(APART), ids=str)
@given(sizes, st.booleans())
@runs
def test_rows_are_copied_and_added_up(
    dtype: torch.dtype, size: tuple[int, int, int], both: bool
) -> None:
    tokens, each, columns = size
    places = _places(tokens, each)
    x = random(0, tokens, columns).to(dtype)
    assert torch.equal(rows.sent(x, places.order, each), experts.sent(x, places))
    low = x.view(torch.uint8)  # as tokens in 8 bits are
    assert torch.equal(rows.sent(low, places.order, each), experts.sent(low, places))
    given_rows = random(1, tokens * each, columns).to(dtype)
    beside = random(2, tokens * each, columns).to(dtype) if both else None
    wide = None if beside is None else beside.double()
    exact = rows.reference(given_rows.double(), wide, places.rows, tokens)
    assert error(rows.combined(given_rows, beside, places.rows, tokens), exact) < APART[dtype]


@pytest.mark.parametrize("dtype", list(APART), ids=str)
@given(sizes, st.booleans())
@runs
def test_choices_without_a_row_add_nothing(
    dtype: torch.dtype, size: tuple[int, int, int], both: bool
) -> None:
    """By hand and by torch's operators."""
    tokens, each, columns = size
    chosen = _places(tokens, each).chosen.masked_fill(random(5, tokens, each) < 0, 9)
    order = experts.in_order(chosen)[: int((chosen < 9).sum())]
    places = experts.Places(chosen, order)
    given_rows, other = (random(i, len(order), columns).to(dtype) for i in range(2))
    beside = other if both else None
    added = given_rows.double() + (other.double() if both else 0.0)
    exact = added.new_zeros(tokens, columns).index_add_(0, places.tokens.long(), added)
    found = rows.combined(given_rows, beside, places.rows, tokens)
    assert error(found, exact) < APART[dtype]
    found = experts.combined(given_rows, places, beside)
    assert error(found, exact) < 4 * APART[dtype]  # torch rounds after every operator


@given(sizes, st.booleans())
@runs
def test_gradients_are_added_to_every_so_manyth_row(
    size: tuple[int, int, int], fresh: bool
) -> None:
    inner, count, columns = size
    part = random(0, count, inner, columns).bfloat16()
    totals = [random(1, inner * count, columns) for _ in range(2)]
    for total, put in zip(totals, (rows.put, experts.put), strict=True):
        put(experts.leaving(total, count), part, fresh=fresh)
    assert torch.equal(*totals)


def test_no_rows_are_nothing() -> None:
    """An expert-parallel rank may get none."""
    none, places = torch.empty(0, 24), torch.empty(0, dtype=torch.int32)
    assert rows.sent(none, places, 1).shape == (0, 24)
    assert rows.combined(none, none, places, 0).shape == (0, 24)
