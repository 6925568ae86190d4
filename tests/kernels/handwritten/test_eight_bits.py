"""Casts to 8 bits: the kernel against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.kernels.handwritten import eight_bits as kernel
from bigplan.runtime.linear import eight_bits
from tests.examples import examples
from tests.kernels.generated import random

runs = settings(max_examples=examples(15), derandomize=True, deadline=None)
dtypes = pytest.mark.parametrize(
    "dtype", [eight_bits.VALUES, eight_bits.GRADIENTS], ids=["e4m3", "e5m2"]
)


def _same(x: torch.Tensor, dtype: torch.dtype) -> None:
    """Kernel and torch cast alike, as it is and transposed."""
    made, turned, factor = kernel.cast(x, dtype, rows=True, columns=True)
    expected, transposed, by = eight_bits.cast(x, dtype, rows=True, columns=True)
    assert made is not None
    assert turned is not None
    assert expected is not None
    assert transposed is not None
    torch.testing.assert_close(factor, by, rtol=1e-6, atol=0.0)
    assert torch.equal(made.float(), expected.float())
    assert torch.equal(turned.float(), transposed.float())
    assert torch.equal(turned.float(), made.float().T)


@dtypes
@given(st.integers(1, 150), st.integers(1, 150), st.integers(-20, 20), st.integers(0, 9))
@runs
def test_what_eight_bits_hold_is_cast_without_loss(
    dtype: torch.dtype, rows: int, columns: int, exponent: int, seed: int
) -> None:
    """Triton's interpreter does not round as a GPU does; these need no rounding."""
    exact = (random(seed, rows, columns) * 4).to(dtype).float()
    exact[0, 0] = torch.finfo(dtype).max
    x = (exact * 2.0**exponent).bfloat16()
    _same(x, dtype)
    made, _, scale = kernel.cast(x, dtype, rows=True, columns=False)
    assert made is not None
    assert torch.equal(made.float() * scale, x.float())


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_a_gpu_rounds_as_torch_does(dtype: torch.dtype, scale: float) -> None:
    _same((random(0, 700, 330) * scale).bfloat16(), dtype)


@dtypes
def test_only_what_is_asked_for_is_made(dtype: torch.dtype) -> None:
    x = random(0, 33, 20).bfloat16()
    rows, none, _ = kernel.cast(x, dtype, rows=True, columns=False)
    assert rows is not None
    assert none is None
    none, columns, _ = kernel.cast(x, dtype, rows=False, columns=True)
    assert columns is not None
    assert none is None
    assert torch.equal(columns.float(), rows.float().T)


@dtypes
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    x = torch.zeros_like(random(0, 8, 16)).bfloat16()
    rows, _, scale = kernel.cast(x, dtype, rows=True, columns=False)
    assert rows is not None
    assert not rows.float().any()
    assert bool(scale.isfinite())


@pytest.mark.gpu
@dtypes
def test_no_number_stays_none(dtype: torch.dtype) -> None:
    x = random(0, 8, 16).bfloat16()
    for lost in (torch.nan, torch.inf):
        x[3, 5] = lost
        rows, _, scale = kernel.cast(x, dtype, rows=True, columns=False)
        assert rows is not None
        assert not bool((rows.float() * scale)[3, 5].isfinite())
