"""Matrices in 4 bits: what is lost, and the kernel against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.kernels import four_bits as kernel
from bigplan.runtime import four_bits
from tests.examples import examples
from tests.kernels.generated import random

runs = settings(max_examples=examples(20), derandomize=True, deadline=None)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
# Half of the widest gap between levels, of a block's largest magnitude; rounding of the scale.
MOST = (1 - 0.6961928009986877) / 2 + 2**-8


@dtypes
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 9))
@runs
def test_the_kernel_restores_what_torch_does(
    dtype: torch.dtype, rows: int, blocks: int, seed: int
) -> None:
    codes, scales = four_bits.quantised(random(seed, rows, blocks * four_bits.BLOCK), dtype)
    assert codes.shape == (rows, blocks * four_bits.BLOCK // (2 * dtype.itemsize))
    assert codes.dtype == scales.dtype == dtype
    exact = four_bits.restored(codes, scales)
    ours = kernel.restored(codes, scales, torch.empty_like(exact))
    # One rounding: Triton's interpreter cuts bf16 off.
    torch.testing.assert_close(ours, exact, rtol=torch.finfo(dtype).eps, atol=0.0)


@dtypes
def test_every_element_becomes_the_nearest_level(dtype: torch.dtype) -> None:
    matrix = random(0, 30, 4 * four_bits.BLOCK)
    matrix[3] = 0.0
    codes, scales = four_bits.quantised(matrix, dtype)
    blocks = matrix.view(30, 4, -1)
    assert torch.equal(scales, blocks.abs().amax(-1).to(dtype))
    levels = torch.tensor(four_bits.LEVELS, dtype=torch.float64)
    candidates = levels * scales.double()[..., None, None]
    nearest = (candidates - blocks.double()[..., None]).abs().amin(-1)
    restored = four_bits.restored(codes, scales).double().view_as(blocks)
    rounding = torch.finfo(dtype).eps * scales.double()[..., None]
    assert ((restored - blocks).abs() <= nearest + rounding + 1e-7).all()
    assert ((restored - blocks).abs() <= MOST * scales.double()[..., None]).all()


@dtypes
def test_levels_of_a_block_are_exact(dtype: torch.dtype) -> None:
    """Sixteen levels times a power of two come back with no more than a rounding."""
    levels = torch.tensor(four_bits.LEVELS)
    matrix = (4.0 * levels).repeat(3, 4)
    codes, scales = four_bits.quantised(matrix, dtype)
    assert torch.equal(four_bits.restored(codes, scales), matrix.to(dtype))
    again = four_bits.quantised(four_bits.restored(codes, scales), dtype)
    assert torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8))
