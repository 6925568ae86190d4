"""Matrices in 4 bits: what is lost, and the kernel against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.kernels.handwritten import four_bits as kernel
from bigplan.rectangle import Rectangle
from bigplan.runtime.linear import four_bits
from bigplan.spec.four_bits import BLOCK, LEVELS, packed_columns
from tests.examples import examples
from tests.kernels.generated import random

runs = settings(max_examples=examples(20), derandomize=True, deadline=None)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
# Half of the widest gap between levels, of a block's largest magnitude; rounding of the scale.
MOST = (1 - 0.6961928009986877) / 2 + 2**-8


@dtypes
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 9))
@runs
def test_the_kernel_unpacks_what_torch_does(
    dtype: torch.dtype, rows: int, blocks: int, seed: int
) -> None:
    columns = blocks * BLOCK
    stored = four_bits.packed(random(seed, rows, columns), dtype)
    assert stored.shape == (rows, packed_columns(columns, dtype.itemsize))
    assert stored.dtype == dtype
    exact = four_bits.unpacked(stored)
    assert exact.shape == (rows, columns)
    # One rounding: Triton's interpreter cuts bf16 off.
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(kernel.unpacked(stored), exact, rtol=rounding, atol=0.0)


@dtypes
def test_every_element_becomes_the_nearest_level(dtype: torch.dtype) -> None:
    matrix = random(0, 30, 4 * BLOCK)
    matrix[3] = 0.0
    found = four_bits.unpacked(four_bits.packed(matrix, dtype))
    assert not found[3].any()
    blocks = matrix.view(30, 4, -1).double()
    scales = blocks.abs().amax(-1).to(dtype).double()[..., None]
    levels = torch.tensor(LEVELS, dtype=torch.float64, device=matrix.device)
    nearest = (levels * scales[..., None] - blocks[..., None]).abs().amin(-1)
    lost = (found.double().view_as(blocks) - blocks).abs()
    assert (lost <= nearest + (torch.finfo(dtype).eps + 1e-6) * scales).all()
    assert (lost <= MOST * scales).all()


@dtypes
def test_levels_of_a_block_are_exact(dtype: torch.dtype) -> None:
    """Sixteen levels times a power of two come back with no more than a rounding."""
    matrix = (4.0 * torch.tensor(LEVELS)).repeat(3, 4)
    stored = four_bits.packed(matrix, dtype)
    found = four_bits.unpacked(stored)
    assert torch.equal(found, matrix.to(dtype))
    assert torch.equal(four_bits.packed(found, dtype).view(torch.uint8), stored.view(torch.uint8))


@dtypes
@given(st.data())
@runs
def test_any_rectangle_is_packed_of_whole_blocks(dtype: torch.dtype, data: st.DataObject) -> None:
    matrix = random(0, 6, 3 * BLOCK)
    stored = four_bits.packed(matrix, dtype)
    width = stored.shape[1]
    first, last = sorted(data.draw(st.sets(st.integers(0, width), min_size=2, max_size=2)))
    part = Rectangle("w", 1, 4, first, last)
    whole = four_bits.unstored(part, dtype)
    found = four_bits.part_of(four_bits.packed(matrix[whole.in_matrix], dtype), part)
    assert torch.equal(
        found.contiguous().view(torch.uint8), stored[part.in_matrix].contiguous().view(torch.uint8)
    )
